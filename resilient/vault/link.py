"""A rank's side of the keeper: stage into shared memory, hand the job over, hear the verdict.

Nothing waits for the keeper on the way: it is told of a job while its bytes are copied, and a
thread listens for the verdict. All ranks hand over, or none does: after each copy they agree
whether every one of them reached its keeper. If one did not, this save is persisted by a thread
in each rank, as without a keeper.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.errors import (
    ConfigError,
    DeadlineExceeded,
    Fenced,
    PeerFailed,
    ResilientError,
)
from resilient.format.shard import HostFile
from resilient.storage.open import local_path
from resilient.storage.shared import map_file
from resilient.storage.urls import protocol_of
from resilient.vault import facts
from resilient.vault.conversation import Conversation
from resilient.vault.handover import Held, to_json
from resilient.vault.persister import ThreadPersister
from resilient.vault.recall import RecallingStore
from resilient.vault.seat import PROTOCOL_VERSION
from resilient.vault.verdict import find_verdict
from resilient.world.agreement import Failure, agree, attempt
from resilient.world.sockets import Address

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.storage.store import Store
    from resilient.vault.desk import Desk
    from resilient.vault.persist import Job
    from resilient.vault.persister import Persister

_PAGE_BYTES = 4096
_ANSWER_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class KeeperAddress:
    """Where this host's keeper is, and what it must know of us.

    Attributes:
        path: of its socket.
        host: this host's name as the others reach it; of rank 0 it is where the board is.
        url: of the repository, for the keeper to open.
        events: file that the keeper's events are appended to; empty for none.
        storage_options: how to reach the repository; goes over the socket that only this user
            may open, and is never shown.
    """

    path: str
    host: str = ""
    url: str = ""
    events: str = ""
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)


class KeeperPersister:
    """Hands jobs to the keeper of this host, and to ``fallback`` when a rank has none.

    Args:
        address: where the keeper is.
        fallback: persists in this process.
    """

    def __init__(self, address: KeeperAddress, fallback: Persister) -> None:
        self._address = address
        self._fallback = fallback
        self._talk: Conversation | None = None
        self._board: Address | None = None
        self._why_not = "it was not asked yet"
        self._is_announced = False
        self._segments: dict[str, memoryview] = {}
        self._handed: tuple[Desk, Job] | None = None
        self._listener: threading.Thread | None = None
        self._heard: Any = None

    def open(self, desk: Desk) -> Store:
        """Connect, wait for what past lives left in flight, and agree on the keepers' board.

        Collective: every rank, before it asks what to resume from.
        """
        mine = attempt(lambda: self._settle(desk))
        self._why_not = mine.message if isinstance(mine, Failure) else ""
        shown = None if isinstance(mine, Failure) else mine
        within_seconds = desk.limits.within_seconds
        board = agree(desk.comms, "keeper/board", shown, _first_if_all, within_seconds)
        if board is None:
            self._lose(self._why_not or "another host has none")
        if self._talk is None:
            return desk.store
        joined = attempt(lambda: self._to().ask("join", board=board))
        if isinstance(joined, Failure):
            self._lose(joined.message)
            return desk.store
        self._board = Address.from_json(board)
        return self._recalling(desk)

    def begin(self, topic: str) -> None:
        """Announce a job; if this process dies now, its peers fail at once."""
        self._is_announced = True
        if self._talk is None:
            return
        begun = attempt(lambda: self._to().tell("begin", topic=topic))
        self._why_not = begun.message if isinstance(begun, Failure) else ""

    def buffer(self, name: str, size_bytes: int) -> memoryview:
        """Return shared memory, or private memory if there is none for a job announced.

        Raises:
            ConfigError: ``host_bytes_max`` is too small.
            ResilientError: there is none yet; past lives still have theirs.
        """
        if self._talk is not None and not self._why_not:
            try:
                return self._reserve(name, size_bytes)
            except ConfigError:
                raise
            except ResilientError as error:
                if not self._is_announced:
                    raise
                self._why_not = error.message
        return self._fallback.buffer(name, size_bytes)

    def submit(self, desk: Desk, job: Job) -> None:
        """Hand the job over if every rank can; else persist it here. Collective."""
        self._is_announced = False
        shared = attempt(lambda: self._all_shared(job))
        why_not = shared.message if isinstance(shared, Failure) else self._why_not
        if isinstance(shared, Failure) and isinstance(shared.cause, ConfigError):
            raise shared.cause
        ruling = agree(
            desk.comms, f"{job.topic}/way", why_not, _first_reason, desk.limits.within_seconds
        )
        if ruling or isinstance(shared, Failure):
            desk.tell(facts.KeeperBypassed(job.about.checkpoint.folder, ruling))
            self._fallback.submit(desk, job)
            return
        self._handed = (desk, shared)
        sent = {"job": to_json(shared, desk.world.rank), "context": dict(desk.emit.context)}
        # If it is gone, the peers learn it from the keepers' board, and all of us at the next wait.
        attempt(lambda: self._to().tell("save", **sent))
        self._listener = threading.Thread(target=self._listen, name="resilient-listen", daemon=True)
        self._listener.start()

    def wait(self) -> None:
        """Return when the job handed over is durable.

        A keeper that died is no verdict: the ruling on the board is, or else the store. Without
        any, the trainers persist by themselves: the bytes still lie in their memory. Collective
        if the job is not durable.

        Raises:
            SaveFailed: it could not be made so; older checkpoints are intact.
            Fenced: a newer life began, so nothing was committed.
        """
        handed, self._handed = self._handed, None
        if handed is None or self._listener is None:
            self._fallback.wait()
            return
        self._listener.join()
        failed = self._heard
        if isinstance(failed, Failure) and isinstance(failed.cause, PeerFailed):
            self._lose(failed.message)
            failed = attempt(lambda: find_verdict(*handed, self._board, failed.message))
        if isinstance(failed, Failure):
            self._persist_here(*handed, failed)

    def close(self) -> None:
        """Leave the keeper; it keeps what was committed last for the next life."""
        self._fallback.close()
        self._lose("it was closed")

    def _settle(self, desk: Desk) -> dict[str, Any]:
        """Introduce this rank, wait for older saves, and return where the keeper's board is."""
        talk = self._talk = Conversation(self._address.path)
        world = desk.world
        url = self._address.url
        talk.ask(
            "hello",
            version=PROTOCOL_VERSION,
            # The keeper has another working folder than a script may have by now.
            url=str(local_path(url).absolute()) if protocol_of(url) == "file" else url,
            world=[world.rank, world.size, world.local_rank],
            scope=desk.comms.scope,
            limits=desk.limits.to_json(),
            events=self._address.events,
            storage_options=dict(self._address.storage_options),
            signing_key=desk.signing.key.secret.hex() if desk.signing.key else "",
        )
        deadline_seconds = desk.clock.monotonic_seconds() + desk.limits.within_seconds
        while talk.ask("settle")["is_busy"] and desk.clock.monotonic_seconds() < deadline_seconds:
            continue
        board: dict[str, Any] = talk.ask("board")["board"]
        return board | {"host": board["host"] or self._address.host}

    def _recalling(self, desk: Desk) -> Store:
        answer = attempt(lambda: self._to().ask("recall"))
        if isinstance(answer, Failure):
            return desk.store
        held = {key: Held.from_json(one) for key, one in answer["held"].items()}
        return RecallingStore(desk.store, held, lambda key: desk.emit(facts.MemoryDoubted(key)))

    def _reserve(self, name: str, size_bytes: int) -> memoryview:
        held = self._segments.get(name)
        if held is None or len(held) < size_bytes:
            # What grows by a few bytes from save to save shall not ask each time.
            roomy_bytes = size_bytes if held is None else size_bytes + size_bytes // 2
            rounded_bytes = -(-roomy_bytes // _PAGE_BYTES) * _PAGE_BYTES
            answer = self._to().ask("reserve", name=name, size_bytes=rounded_bytes)
            held = map_file(Path(answer["path"]), answer["size_bytes"], writable=True)
            self._segments[name] = held
        return held[:size_bytes]

    def _all_shared(self, job: Job) -> Job:
        """Return the job with every file in shared memory: small ones are copied now."""
        if self._why_not:
            raise PeerFailed(self._why_not)
        # The announcement was heard while the bytes were copied.
        self._to().hear()
        return replace(job, files=tuple(self._shared(file) for file in job.files))

    def _shared(self, file: HostFile) -> HostFile:
        held = self._segments.get(file.name)
        data = memoryview(file.data)
        if held is not None and held.obj is data.obj:
            return file
        target = self._reserve(file.name, len(data))
        target[:] = data
        return HostFile(file.name, target, file.tensors)

    def _persist_here(self, desk: Desk, job: Job, failed: Failure) -> None:
        """Persist in this process if a rank's keeper is gone, else raise what failed. Collective.

        Raises:
            SaveFailed: it could not be made durable this way either.
            Fenced: a newer life began.
        """
        shown = failed if failed.code == Fenced.code else {"gone": self._talk is None}
        # A rank that died cannot answer; its peers shall not wait for it as for a slow store.
        within_seconds = min(desk.limits.within_seconds, _ANSWER_SECONDS)
        topic = f"{job.topic}/here"
        try:
            is_gone = agree(desk.comms, f"{topic}/why", shown, _is_any_gone, within_seconds)
        except (DeadlineExceeded, PeerFailed):
            is_gone = False
        if not is_gone:
            raise failed.cause or failed.to_error(1)
        desk.tell(facts.KeeperBypassed(job.about.checkpoint.folder, failed.message))
        self._fallback.submit(desk, replace(job, topic=topic))
        self._fallback.wait()

    def _listen(self) -> None:
        self._heard = attempt(self._hear_verdict)

    def _hear_verdict(self) -> None:
        """Return when the keeper says that the job is durable.

        Raises:
            PeerFailed: the keeper did not take it, or is gone.
            ResilientError: its verdict.
        """
        talk = self._to()
        try:
            talk.hear()
        except ResilientError as error:
            raise PeerFailed(error.message) from error
        while talk.ask("wait").get("is_pending"):
            continue

    def _to(self) -> Conversation:
        """Return the conversation with the keeper.

        Raises:
            PeerFailed: there is none.
        """
        if self._talk is not None and self._talk.is_over:
            self._lose("it did not answer")
        if self._talk is None:
            raise PeerFailed(f"the keeper is gone: {self._why_not}")
        return self._talk

    def _lose(self, why: str) -> None:
        self._why_not = self._why_not or why
        # One that was only asleep may still read them: nobody writes there any more.
        self._segments = {}
        if self._talk is not None:
            self._talk.close()
            self._talk = None


def persister_for(
    keeper: KeeperAddress | None, url: str, storage_options: Mapping[str, Any]
) -> Persister:
    """Return who persists jobs for ``url``: the keeper if there is one, else a thread."""
    thread = ThreadPersister()
    if keeper is None:
        return thread
    address = replace(keeper, url=url, storage_options=storage_options)
    return KeeperPersister(address, thread)


def _first_if_all(boards: list[Any]) -> Any:
    return boards[0] if all(boards) else None


def _first_reason(reasons: list[str]) -> str:
    for rank, reason in enumerate(reasons):
        if reason:
            return f"rank {rank}: {reason}" if len(reasons) > 1 else reason
    return ""


def _is_any_gone(shown: list[Any]) -> bool:
    return any(one["gone"] for one in shown)
