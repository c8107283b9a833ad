"""Agreement over a Board: everyone shows, one rules, everyone obeys.

Never through the accelerator's collectives: those hang with the training they serve.
Values are JSON, so nothing received can run code.
"""

from __future__ import annotations

import json
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from resilient.errors import DeadlineExceeded, PeerFailed
from resilient.world.board import Closing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from resilient.world.board import Board
    from resilient.world.world import World


class Comms:
    """Gather and broadcast of small JSON values among the ranks of one life.

    Every topic is used once; ``scope`` keeps the lives and the users of a board apart.

    Args:
        board: where values are posted.
        world: who this rank is.
        scope: prefix of every key.
    """

    def __init__(self, board: Board, world: World, scope: str) -> None:
        self.world = world
        self.scope = scope
        self._board = board
        self._spoken: list[str] = []
        self._beats = 0

    def key(self, topic: str, who: int | str) -> str:
        """Return where on the board a rank shows its value, or the coordinator its ruling."""
        return f"{self.scope}/{topic}/{who}"

    def over(self, board: Board) -> Comms:
        """Return the same ranks and scope on another board."""
        return Comms(board, self.world, self.scope)

    def apart(self, name: str, world: World) -> Comms:
        """Return another world on a connection of its own, for use by another thread."""
        return Comms(self._board.another(), world, f"{self.scope}/{name}")

    def close(self) -> None:
        """End the connection of ``apart``; nobody uses it any more."""
        if isinstance(self._board, Closing):
            self._board.close()

    @property
    def here(self) -> str:
        """The address of this host as the others reach it."""
        return self._board.here()

    def call(self, topic: str) -> None:
        """Let the others know that this rank waits at ``topic``, where they may not expect it.

        Raises:
            PeerFailed: the board is gone.
        """
        self._board.post(self.key(topic, "call"), b"")

    def is_called(self, topic: str) -> bool:
        """Say whether a rank waits at ``topic``; never waits itself.

        Raises:
            PeerFailed: the board is gone.
        """
        return self._board.peek(self.key(topic, "call")) is not None

    def answer(self, topic: str, failure: Mapping[str, Any]) -> None:
        """Show a failure on a topic without waiting for the others; the coordinator rules with it.

        For a rank that does not come to ``topic``: whoever waits there fails at once.

        Args:
            topic: names the agreement.
            failure: as JSON, with the number of this rank.

        Raises:
            PeerFailed: the board is gone.
        """
        who = "ruling" if self.world.is_coordinator else self.world.rank
        said = {key: one for key, one in failure.items() if key != "rank" or who == "ruling"}
        self._board.post(self.key(topic, who), json.dumps(said).encode())

    @contextmanager
    def at_work(self) -> Iterator[Callable[[], None]]:
        """Yield what to call now and then inside: who waits for this rank goes on waiting then.

        For work without a bound of its own, such as a host's share of a promotion: as long as it
        goes on, this rank is not silent, however much longer it takes than the others.
        """
        key = self.key("beat", self.world.rank)

        def beat() -> None:
            self._beats += 1
            self._board.post(key, str(self._beats).encode())

        try:
            yield beat
        finally:
            self._board.remove(key)

    def gather(self, topic: str, value: Any, within_seconds: float) -> list[Any] | None:
        """Show ``value``; the coordinator gets everyone's, in the order of ranks.

        Args:
            topic: names it.
            value: of this rank.
            within_seconds: how long a rank may be silent: neither here nor ``at_work``.

        Returns:
            The values at the coordinator, None elsewhere.

        Raises:
            DeadlineExceeded: at the coordinator, naming the ranks that were silent.
        """
        self._board.post(self.key(topic, self.world.rank), json.dumps(value).encode())
        if not self.world.is_coordinator:
            return None
        keys = [self.key(topic, rank) for rank in range(self.world.size)]
        before: dict[int, bytes] = {}
        while (shown := self._board.wait(keys, within_seconds)) is None:
            absent = [rank for rank, key in enumerate(keys) if self._board.peek(key) is None]
            beats = self._beats_of(absent)
            silent = [one for one in absent if beats.get(one) == before.get(one)]
            if silent:
                raise DeadlineExceeded(
                    f"`{topic}`: ranks {silent} did not answer within {within_seconds:g} s",
                    deadline_seconds=within_seconds,
                    hint=_hint(within_seconds),
                )
            before = beats
        return [json.loads(one) for one in shown]

    def broadcast(self, topic: str, ruling: Any, within_seconds: float) -> Any:
        """Give the coordinator's ``ruling`` to all; other ranks' argument is ignored.

        Args:
            topic: names it.
            ruling: of the coordinator.
            within_seconds: how long it may take while no rank is ``at_work``.

        Raises:
            DeadlineExceeded: the coordinator did not rule in time.
        """
        key = self.key(topic, "ruling")
        if self.world.is_coordinator:
            self._board.post(key, json.dumps(ruling).encode())
            self._forget_older(key)
            self._forget_mine(topic)
            return ruling
        before: dict[int, bytes] = {}
        while (heard := self._board.wait([key], within_seconds)) is None:
            # It may be waiting for any of them.
            beats = self._beats_of(range(self.world.size))
            if beats == before:
                raise DeadlineExceeded(
                    f"`{topic}`: the coordinator did not rule within {within_seconds:g} s",
                    deadline_seconds=within_seconds,
                    hint=_hint(within_seconds),
                )
            before = beats
        self._forget_mine(topic)
        return json.loads(heard[0])

    def _beats_of(self, ranks: Iterable[int]) -> dict[int, bytes]:
        """Return what those ranks that are at work have shown of it last."""
        beats = {rank: self._board.peek(self.key("beat", rank)) for rank in ranks}
        return {rank: beat for rank, beat in beats.items() if beat is not None}

    def _forget_mine(self, topic: str) -> None:
        """Drop what this rank has shown: there is a ruling, so the coordinator has read it.

        Each rank its own: the coordinator would delete those of all, one after the other, while
        all wait for it. Whoever does not get to it leaves a value that nobody reads.
        """
        with suppress(PeerFailed):
            self._board.remove(self.key(topic, self.world.rank))

    def _forget_older(self, key: str) -> None:
        """Drop rulings that everyone has heard: a rank that gathers again has read the last."""
        self._spoken.append(key)
        while len(self._spoken) > 2:  # noqa: PLR2004
            self._board.remove(self._spoken.pop(0))


def _hint(within_seconds: float) -> str:
    return (
        "see in their logs what those ranks did meanwhile, and run the same command again: it "
        f"goes on from the newest checkpoint; if ranks may be {within_seconds:g} s apart, with a "
        "larger TrainingArguments(save_within_seconds=...) or Checkpointer(..., within_seconds=...)"
    )
