"""Coordination of ranks: gather, decide, broadcast, and propagation of failures.

An agreement goes through a key-value store. Each rank posts a value, the coordinator (rank 0)
decides over all values, and all ranks read the decision. The agreement never uses the accelerator's
collectives, because collectives hang if the training hangs. Values are JSON, so no received value
can run code. If a rank fails, the rank posts a failure instead of its value. The other ranks then
fail at once instead of at a deadline.
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
    """Gather and broadcast of small JSON values among the ranks of one attempt.

    Each topic names one agreement and is used once. ``scope`` keeps the keys of different attempts
    and of different components apart.

    Args:
        kv_store: Key-value store for the values.
        world: Identity of this rank.
        scope: Prefix of every key.
    """

    def __init__(self, kv_store: KVStore, world: World, scope: str) -> None:
        self.world = world
        self.scope = scope
        self._kv_store = kv_store
        self._published_keys: list[str] = []
        self._heartbeats_sent = 0

    def key(self, topic: str, author: int | str) -> str:
        """Return the key of a rank's value, or of the coordinator's decision."""
        return f"{self.scope}/{topic}/{author}"

    def over(self, kv_store: KVStore) -> ControlGroup:
        """Return a group of the same ranks and scope on another store."""
        return ControlGroup(kv_store, self.world, self.scope)

    def apart(self, name: str, world: World) -> ControlGroup:
        """Return a group of another world, with its own connection, for use by another thread."""
        return ControlGroup(self._kv_store.another(), world, f"{self.scope}/{name}")

    def close(self) -> None:
        """Close the connection that ``apart`` opened."""
        if isinstance(self._kv_store, Closeable):
            self._kv_store.close()

    @property
    def here(self) -> str:
        """Address under which the other hosts reach this host."""
        return self._kv_store.here()

    def call(self, topic: str) -> None:
        """Announce that this rank waits at ``topic``.

        The other ranks may not expect this agreement. They can check with ``is_called``.

        Raises:
            PeerFailed: The key-value store cannot be reached.
        """
        self._kv_store.post(self.key(topic, "call"), b"")

    def is_called(self, topic: str) -> bool:
        """Return whether a rank waits at ``topic``; never blocks.

        Raises:
            PeerFailed: The key-value store is gone.
        """
        return self._kv_store.peek(self.key(topic, "call")) is not None

    def answer(self, topic: str, failure: Mapping[str, Any]) -> None:
        """Post a failure on a topic without waiting, in place of this rank's value.

        A rank calls this method if it never reaches ``topic``. Each rank that waits there then
        fails at once.

        Args:
            topic: Name of the agreement.
            failure: Failure as JSON, with the number of this rank.

        Raises:
            PeerFailed: The key-value store is gone.
        """
        author = "ruling" if self.world.is_coordinator else self.world.rank
        answer_fields = {
            key: value for key, value in failure.items() if key != "rank" or author == "ruling"
        }
        self._kv_store.post(self.key(topic, author), json.dumps(answer_fields).encode())

    @contextmanager
    def at_work(self) -> Iterator[Callable[[], None]]:
        """Yield a function to call regularly, so that ranks that wait for this rank keep waiting.

        Use this for work without a time limit, such as copying a checkpoint to the durable tier.
        During the work this rank does not count as silent, even if it is much slower than the other
        ranks.
        """
        key = self.key("beat", self.world.rank)

        def send_heartbeat() -> None:
            self._heartbeats_sent += 1
            self._kv_store.post(key, str(self._heartbeats_sent).encode())

        try:
            yield send_heartbeat
        finally:
            self._kv_store.remove(key)

    def gather(self, topic: str, value: Any, within_seconds: float) -> list[Any] | None:
        """Post ``value``; the coordinator gets the values of all ranks, in the order of ranks.

        Args:
            topic: Name of the agreement.
            value: Value of this rank.
            within_seconds: Maximum silence of a rank. A rank is silent while it has not posted its
                value and does not call the function of ``at_work``.

        Returns:
            The values at the coordinator, None at the other ranks.

        Raises:
            DeadlineExceeded: At the coordinator, with the names of the silent ranks.
        """
        self._kv_store.post(self.key(topic, self.world.rank), json.dumps(value).encode())
        if not self.world.is_coordinator:
            return None
        keys = [self.key(topic, rank) for rank in range(self.world.size)]
        previous_heartbeats: dict[int, bytes] = {}
        while (answers := self._kv_store.wait(keys, within_seconds)) is None:
            absent_ranks = [
                rank for rank, key in enumerate(keys) if self._kv_store.peek(key) is None
            ]
            heartbeats = self._heartbeats_of(absent_ranks)
            silent_ranks = [
                rank
                for rank in absent_ranks
                if heartbeats.get(rank) == previous_heartbeats.get(rank)
            ]
            if silent_ranks:
                raise DeadlineExceeded(
                    f"`{topic}`: ranks {silent_ranks} did not answer within {within_seconds:g} s",
                    deadline_seconds=within_seconds,
                    hint=_hint(within_seconds),
                )
            previous_heartbeats = heartbeats
        return [json.loads(answer) for answer in answers]

    def broadcast(self, topic: str, decision: Any, within_seconds: float) -> Any:
        """Send the coordinator's ``decision`` to all ranks; the argument of other ranks is ignored.

        Args:
            topic: Name of the agreement.
            decision: Decision of the coordinator.
            within_seconds: Deadline for the decision. The wait continues while any rank calls the
                function of ``at_work``.

        Raises:
            DeadlineExceeded: The coordinator did not decide in time.
        """
        key = self.key(topic, "ruling")
        if self.world.is_coordinator:
            self._kv_store.post(key, json.dumps(decision).encode())
            self._delete_older_decisions(key)
            self._delete_own_value(topic)
            return decision
        previous_heartbeats: dict[int, bytes] = {}
        while (messages := self._kv_store.wait([key], within_seconds)) is None:
            # The coordinator may be waiting for any of the ranks.
            heartbeats = self._heartbeats_of(range(self.world.size))
            if heartbeats == previous_heartbeats:
                raise DeadlineExceeded(
                    f"`{topic}`: the coordinator did not decide within {within_seconds:g} s",
                    deadline_seconds=within_seconds,
                    hint=_hint(within_seconds),
                )
            previous_heartbeats = heartbeats
        self._delete_own_value(topic)
        return json.loads(messages[0])

    def _heartbeats_of(self, ranks: Iterable[int]) -> dict[int, bytes]:
        """Return the last heartbeats of the ranks that are in ``at_work``."""
        heartbeats = {rank: self._kv_store.peek(self.key("beat", rank)) for rank in ranks}
        return {rank: heartbeat for rank, heartbeat in heartbeats.items() if heartbeat is not None}

    def _delete_own_value(self, topic: str) -> None:
        """Delete this rank's value, which the coordinator has read before its decision.

        Each rank deletes its own value. The coordinator would delete the values one after the other
        while all ranks wait. A value that remains is never read.
        """
        with suppress(PeerFailed):
            self._kv_store.remove(self.key(topic, self.world.rank))

    def _delete_older_decisions(self, key: str) -> None:
        """Delete old decisions, because a rank reads each decision before the next agreement."""
        self._published_keys.append(key)
        while len(self._published_keys) > 2:  # noqa: PLR2004
            self._kv_store.remove(self._published_keys.pop(0))


def _hint(within_seconds: float) -> str:
    return (
        "read the logs of those ranks, and run the same command again: it continues from the "
        f"newest checkpoint. If ranks may be {within_seconds:g} s apart, raise "
        "TrainingArguments(save_within_seconds=...) or Checkpointer(..., within_seconds=...)"
    )


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Failure of a rank, posted instead of its value.

    Attributes:
        code: RES id of the error.
        message: Message of the error.
        hint: Command to run next.
        rank: Rank that failed; -1 until known.
        cause: Original exception; set only in the process that raised it.
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
        """Return an error of the same kind; with several ranks, the error names the rank."""
        kind = _KINDS.get(self.code, ResilientError)
        rank_text = f"rank {self.rank}: " if size > 1 and self.rank >= 0 else ""
        return kind(f"{rank_text}{self.message}", hint=self.hint)


def _subclasses(kind: type[ResilientError]) -> list[type[ResilientError]]:
    return [
        kind,
        *(descendant for subclass in kind.__subclasses__() for descendant in _subclasses(subclass)),
    ]


_KINDS = {kind.code: kind for kind in _subclasses(errors.ResilientError)}


def capture_failure(work: Callable[[], Any]) -> Any | RankFailure:
    """Return the result of ``work``, or the failure to post instead."""
    try:
        return work()
    except ResilientError as error:
        return RankFailure(error.code, error.message, error.hint, cause=error)
    except Exception as error:  # noqa: BLE001 - peers must not wait, whatever the error is
        return RankFailure("RES-ERROR", f"{type(error).__name__}: {error}", cause=error)


def agree(
    comms: ControlGroup,
    topic: str,
    own_result: Any | RankFailure,
    decide: Callable[[list[Any]], Any],
    within_seconds: float,
) -> Any:
    """Post ``own_result``, let the coordinator decide over all values, and return the decision.

    Collective: every rank, same topic, each topic once.

    Args:
        comms: Group of ranks.
        topic: Name of this agreement.
        own_result: A JSON-able value, or a RankFailure.
        decide: Function called on the coordinator with the values by rank, if no rank failed. Its
            result is JSON-able. An error that it raises becomes the failure of all ranks.
        within_seconds: Deadline for the ranks' values, and then for the coordinator's decision.

    Raises:
        ResilientError: The failure of the first failed rank, or of the rule, as an error of the
            same kind.
        DeadlineExceeded: A rank was silent, or the coordinator did not decide.
    """
    own_answer = (
        own_result.to_json() if isinstance(own_result, RankFailure) else {"value": own_result}
    )
    decision: Any = None
    gather_result = capture_failure(lambda: comms.gather(topic, own_answer, within_seconds))
    if comms.world.is_coordinator:
        decision = _decide_or_fail(gather_result, decide)
        answer = (
            decision.to_json() | {"rank": decision.rank}
            if isinstance(decision, RankFailure)
            else None
        )
        # Ranks that were silent until now may arrive later, and then read the same decision.
        comms.broadcast(topic, answer or {"value": decision}, within_seconds)
    else:
        if isinstance(gather_result, RankFailure):
            raise _error_to_raise(gather_result, comms.world.size, gather_result.cause)
        decision = _await_decision(comms, topic, within_seconds)
    if isinstance(decision, RankFailure):
        cause = decision.cause or (
            own_result.cause if isinstance(own_result, RankFailure) else None
        )
        raise _error_to_raise(decision, comms.world.size, cause)
    return decision


def _error_to_raise(failure: RankFailure, size: int, cause: BaseException | None) -> BaseException:
    """Return the error to raise for a failure; a single rank raises its own error again."""
    if size == 1 and isinstance(cause, ResilientError):
        return cause
    error = failure.to_error(size)
    error.__cause__ = cause
    return error


def read_decision(comms: ControlGroup, topic: str, within_seconds: float) -> Any:
    """Return the decision on ``topic`` without posting a value.

    A rank calls this function if another process posts the value of the rank. The coordinator must
    not call it.

    Raises:
        ResilientError: As for ``agree``.
        DeadlineExceeded: The coordinator did not decide.
    """
    decision = _await_decision(comms, topic, within_seconds)
    if isinstance(decision, RankFailure):
        raise decision.to_error(comms.world.size)
    return decision


def _await_decision(comms: ControlGroup, topic: str, within_seconds: float) -> Any | RankFailure:
    # The coordinator may wait for the slowest rank and then work on its decision.
    return _parse(comms.broadcast(topic, None, 2 * within_seconds))


def _decide_or_fail(gathered: Any, decide: Callable[[list[Any]], Any]) -> Any | RankFailure:
    if isinstance(gathered, RankFailure):
        return gathered
    for rank, answer in enumerate(gathered):
        if "failure" in answer:
            return RankFailure(**answer["failure"], rank=rank)
    return capture_failure(lambda: decide([answer["value"] for answer in gathered]))


def _parse(answer: dict[str, Any]) -> Any | RankFailure:
    if "failure" in answer:
        return RankFailure(**answer["failure"], rank=answer.get("rank", -1))
    return answer["value"]
