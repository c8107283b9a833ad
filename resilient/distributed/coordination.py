"""Gather-decide-broadcast among ranks, failure propagation.

Agreement over a Board: everyone shows, one rules, everyone obeys.

Never through the accelerator's collectives: those hang with the training they serve.
Values are JSON, so nothing received can run code.

One agreement, both ways: everyone shows, the coordinator rules, everyone obeys.

A rank that cannot do its part shows a Failure in place of its value, so its peers learn at once
instead of waiting for a deadline.
"""

from __future__ import annotations

import json
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from resilient import errors
from resilient.distributed.kv_store import Closeable
from resilient.errors import DeadlineExceeded, PeerFailed, ResilientError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from resilient.distributed.kv_store import KVStore
    from resilient.distributed.launch_env import World


class ControlGroup:
    """Gather and broadcast of small JSON values among the ranks of one life.

    Every topic is used once; ``scope`` keeps the lives and the users of a board apart.

    Args:
        board: where values are posted.
        world: who this rank is.
        scope: prefix of every key.
    """

    def __init__(self, board: KVStore, world: World, scope: str) -> None:
        self.world = world
        self.scope = scope
        self._board = board
        self._spoken: list[str] = []
        self._beats = 0

    def key(self, topic: str, who: int | str) -> str:
        """Return where on the board a rank shows its value, or the coordinator its ruling."""
        return f"{self.scope}/{topic}/{who}"

    def over(self, board: KVStore) -> ControlGroup:
        """Return the same ranks and scope on another board."""
        return ControlGroup(board, self.world, self.scope)

    def apart(self, name: str, world: World) -> ControlGroup:
        """Return another world on a connection of its own, for use by another thread."""
        return ControlGroup(self._board.another(), world, f"{self.scope}/{name}")

    def close(self) -> None:
        """End the connection of ``apart``; nobody uses it any more."""
        if isinstance(self._board, Closeable):
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


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Why a rank could not do its part; travels in place of the part.

    Attributes:
        code: RES id of the error.
        message: its text.
        hint: the command to run next.
        rank: who failed; -1 until it is known.
        cause: the exception itself, in the process where it happened.
    """

    code: str
    message: str
    hint: str = ""
    rank: int = -1
    cause: BaseException | None = field(default=None, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able value."""
        return {"failure": {"code": self.code, "message": self.message, "hint": self.hint}}

    def to_error(self, size: int) -> ResilientError:
        """Return an error of the same kind, naming the rank if there are several."""
        kind = _KINDS.get(self.code, ResilientError)
        where = f"rank {self.rank}: " if size > 1 and self.rank >= 0 else ""
        return kind(f"{where}{self.message}", hint=self.hint)


def _subclasses(kind: type[ResilientError]) -> list[type[ResilientError]]:
    return [kind, *(deeper for one in kind.__subclasses__() for deeper in _subclasses(one))]


_KINDS = {kind.code: kind for kind in _subclasses(errors.ResilientError)}


def capture_failure(work: Callable[[], Any]) -> Any | RankFailure:
    """Return what ``work`` returns, or the Failure to show in its place."""
    try:
        return work()
    except ResilientError as error:
        return RankFailure(error.code, error.message, error.hint, cause=error)
    except Exception as error:  # noqa: BLE001 - whatever happened, the peers must not wait for us
        return RankFailure("RES-ERROR", f"{type(error).__name__}: {error}", cause=error)


def agree(
    comms: ControlGroup,
    topic: str,
    mine: Any | RankFailure,
    rule: Callable[[list[Any]], Any],
    within_seconds: float,
) -> Any:
    """Show ``mine``, let the coordinator rule over what all showed, and return the ruling.

    Collective: every rank, same topic, each topic once.

    Args:
        comms: among whom.
        topic: names this agreement.
        mine: a JSON-able value, or a Failure.
        rule: called on the coordinator with the values by rank, when nobody failed; its result
            is JSON-able. What it raises becomes everyone's failure.
        within_seconds: how long the ranks may take to show, and then the coordinator to rule.

    Raises:
        ResilientError: the first rank's failure, or the rule's, as an error of the same kind.
        DeadlineExceeded: a rank was silent, or the coordinator did not rule.
    """
    shown = mine.to_json() if isinstance(mine, RankFailure) else {"value": mine}
    ruling: Any = None
    gathered = capture_failure(lambda: comms.gather(topic, shown, within_seconds))
    if comms.world.is_coordinator:
        ruling = _conclude(gathered, rule)
        heard = (
            ruling.to_json() | {"rank": ruling.rank} if isinstance(ruling, RankFailure) else None
        )
        # Ranks that were silent until now may still come; they read the same ruling.
        comms.broadcast(topic, heard or {"value": ruling}, within_seconds)
    else:
        if isinstance(gathered, RankFailure):
            raise gathered.to_error(comms.world.size) from gathered.cause
        ruling = _hear(comms, topic, within_seconds)
    if isinstance(ruling, RankFailure):
        cause = ruling.cause or (mine.cause if isinstance(mine, RankFailure) else None)
        raise ruling.to_error(comms.world.size) from cause
    return ruling


def read_decision(comms: ControlGroup, topic: str, within_seconds: float) -> Any:
    """Return the ruling on ``topic`` without having a part in it; never on the coordinator.

    For one whose part another process does in its name.

    Raises:
        ResilientError: as ``agree`` raises it.
        DeadlineExceeded: the coordinator did not rule.
    """
    ruling = _hear(comms, topic, within_seconds)
    if isinstance(ruling, RankFailure):
        raise ruling.to_error(comms.world.size)
    return ruling


def _hear(comms: ControlGroup, topic: str, within_seconds: float) -> Any | RankFailure:
    # The coordinator may wait for the slowest rank and then work on its ruling.
    return _parse(comms.broadcast(topic, None, 2 * within_seconds))


def _conclude(gathered: Any, rule: Callable[[list[Any]], Any]) -> Any | RankFailure:
    if isinstance(gathered, RankFailure):
        return gathered
    for rank, one in enumerate(gathered):
        if "failure" in one:
            return RankFailure(**one["failure"], rank=rank)
    return capture_failure(lambda: rule([one["value"] for one in gathered]))


def _parse(heard: dict[str, Any]) -> Any | RankFailure:
    if "failure" in heard:
        return RankFailure(**heard["failure"], rank=heard.get("rank", -1))
    return heard["value"]
