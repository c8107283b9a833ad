"""Detection of a rank that continues to train while another rank waits for it at ``save()``.

``if rank == 0: checkpointer.save(step)`` makes rank 0 wait for ranks that never call ``save()``. A
second thread of a rank that misses the save posts a failure for this rank. The other ranks then
fail at once, with the hint that all ranks must call ``save()``.

A rank is certainly absent in these cases:

* The rank closed its checkpointer.
* The rank made more optimizer steps than the waiting rank had made at its call.
* The rank made equally many steps, and its thread is in a backward pass or collective that needs
  the waiting rank.
"""

from __future__ import annotations

import json
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from resilient.distributed.coordination import RankFailure
from resilient.errors import PeerFailed, SaveFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from resilient.distributed.coordination import ControlGroup
    from resilient.distributed.kv_store import KVStore

_LOOK_SECONDS = 1.0
_LOOKS_PER_SECOND_MAX = 200
_FRAMES_MAX = 12
_HINT = (
    "call save() on every rank at the same step: remove `if rank == 0` around it; each byte is "
    "still written only once"
)


def decline_save(comms: ControlGroup, save: int, reason: str) -> None:
    """Answer that this rank does not take part in a save, so every agreement of the save fails.

    Args:
        comms: Group on a key-value store that no other thread uses now.
        save: Number of the save, counted from 1 on every rank.
        reason: Subject and verb, for example ``it closed its checkpointer``.

    Raises:
        PeerFailed: The key-value store is gone.
    """
    failure = RankFailure(
        SaveFailed.code, f"{reason} and did not call save(); all ranks call save()", _HINT
    )
    for topic in agreements_of(save):
        comms.answer(topic, failure.to_json() | {"rank": comms.world.rank})


def agreements_of(save: int) -> tuple[str, ...]:
    """Return the topics of all agreements in which a rank may wait during a save."""
    topic = f"save/{save}"
    return (f"{topic}/call", f"{topic}/way", f"{topic}/space", topic)


class MissedSaveDetector:
    """Thread that answers for this rank if it misses a save for which a peer waits.

    Args:
        comms: Group of the checkpointer's ranks.
        kv_store: Key-value store with its own connection.
        saves: Function that returns the number of saves that this rank began.
        steps: Function that returns the number of optimizer steps that this rank made.
    """

    def __init__(
        self,
        comms: ControlGroup,
        kv_store: KVStore,
        saves: Callable[[], int],
        steps: Callable[[], int],
    ) -> None:
        self._comms = comms.over(kv_store)
        self._kv_store = kv_store
        self._saves = saves
        self._steps = steps
        rank, size = comms.world.rank, comms.world.size
        # Only ranks 0 and 1 publish their calls: rank 0 watches rank 1, all others watch rank 0.
        self._peer = 0 if rank else 1
        self._publishes_calls = rank < 2  # noqa: PLR2004
        self._look_seconds = max(_LOOK_SECONDS, size / _LOOKS_PER_SECOND_MAX)
        self._trainer_thread = threading.get_ident()
        self._save_call = (0, 0)
        self._published_call = 0
        self._is_inside = False
        self._suspicion: tuple[int, str] | None = None
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._run, name="missed-saves", daemon=True)

    def start(self) -> None:
        """Start a check once per second."""
        self._thread.start()

    def decline(self, reason: str) -> None:
        """End the thread, and answer for this rank in every later save of a peer.

        Args:
            reason: Subject and verb, for example ``it closed its checkpointer``.
        """
        self._end()
        with suppress(PeerFailed):
            decline_save(self._comms, self._saves() + 1, reason)

    def stop(self) -> None:
        """End the thread and its connection."""
        self._end()
        self._comms.close()

    def _end(self) -> None:
        self._stop_event.set()
        self._thread.join()

    @contextmanager
    def inside(self, save: int = 0) -> Iterator[None]:
        """Return a context of a call that all ranks make, for example of ``save()``.

        Args:
            save: Number of the save that the call begins.
        """
        if save:
            self._save_call = (save, self._steps())
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    def _run(self) -> None:
        while not self._stop_event.wait(self._look_seconds):
            try:
                self._check_peer()
            except PeerFailed:
                # Without the key-value store no rank receives an answer.
                return

    def _check_peer(self) -> None:
        save, steps = self._save_call
        if self._publishes_calls and save > self._published_call:
            self._published_call = save
            call = json.dumps({"save": save, "steps": steps}).encode()
            self._kv_store.post(self._comms.key("saves", self._comms.world.rank), call)
        peer_call = self._kv_store.peek(self._comms.key("saves", self._peer))
        next_save = self._saves() + 1
        evidence = "" if peer_call is None else self._evidence(json.loads(peer_call), next_save)
        is_certain = bool(evidence) and self._suspicion == (next_save, evidence)
        self._suspicion = (next_save, evidence)
        if is_certain and not self._is_inside and self._saves() + 1 == next_save:
            decline_save(self._comms, next_save, evidence)

    def _evidence(self, call: dict[str, Any], missed: int) -> str:
        """Return the reason why this rank cannot be about to save; empty if it may be."""
        steps_ahead = self._steps() - int(call["steps"])
        if self._is_inside or int(call["save"]) < missed or steps_ahead < 0:
            return ""
        if steps_ahead:
            return "it made more optimizer steps"
        call_text = blocked_in(sys._current_frames().get(self._trainer_thread), self._peer)  # noqa: SLF001
        return f"it is in {call_text}" if call_text else ""


def blocked_in(frame: FrameType | None, peer: int) -> str:
    """Return the call in which a thread may need a peer: a backward pass or a collective.

    Args:
        frame: Innermost frame of the thread.
        peer: Rank that must belong to the group of a collective.
    """
    for _ in range(_FRAMES_MAX):
        if frame is None:
            return ""
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.endswith("torch/autograd/graph.py") and name == "_engine_run_backward":
            return "a backward pass"
        if file.endswith("torch/nn/parallel/distributed.py"):
            return "a forward pass of DistributedDataParallel"
        if file.endswith("torch/distributed/distributed_c10d.py") and "group" in frame.f_locals:
            return f"torch.distributed.{name}" if peer in _ranks_of(frame) else ""
        frame = frame.f_back
    return ""


def _ranks_of(frame: FrameType) -> Sequence[int]:
    # A process with such a frame has already imported torch.distributed.
    import torch.distributed as dist

    return dist.get_process_group_ranks(frame.f_locals["group"])
