"""One agreement, both ways: everyone shows, the coordinator rules, everyone obeys.

A rank that cannot do its part shows a Failure in place of its value, so its peers learn at once
instead of waiting for a deadline.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from resilient import errors
from resilient.errors import ResilientError

if TYPE_CHECKING:
    from collections.abc import Callable

    from resilient.world.comms import Comms


@dataclass(frozen=True, slots=True)
class Failure:
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


def attempt(work: Callable[[], Any]) -> Any | Failure:
    """Return what ``work`` returns, or the Failure to show in its place."""
    try:
        return work()
    except ResilientError as error:
        return Failure(error.code, error.message, error.hint, cause=error)
    except Exception as error:  # noqa: BLE001 - whatever happened, the peers must not wait for us
        return Failure("RES-ERROR", f"{type(error).__name__}: {error}", cause=error)


def agree(
    comms: Comms,
    topic: str,
    mine: Any | Failure,
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
    shown = mine.to_json() if isinstance(mine, Failure) else {"value": mine}
    ruling: Any = None
    gathered = attempt(lambda: comms.gather(topic, shown, within_seconds))
    if comms.world.is_coordinator:
        ruling = _conclude(gathered, rule)
        heard = ruling.to_json() | {"rank": ruling.rank} if isinstance(ruling, Failure) else None
        # Ranks that were silent until now may still come; they read the same ruling.
        comms.broadcast(topic, heard or {"value": ruling}, within_seconds)
    else:
        if isinstance(gathered, Failure):
            raise gathered.to_error(comms.world.size) from gathered.cause
        ruling = _hear(comms, topic, within_seconds)
    if isinstance(ruling, Failure):
        cause = ruling.cause or (mine.cause if isinstance(mine, Failure) else None)
        raise ruling.to_error(comms.world.size) from cause
    return ruling


def hear(comms: Comms, topic: str, within_seconds: float) -> Any:
    """Return the ruling on ``topic`` without having a part in it; never on the coordinator.

    For one whose part another process does in its name.

    Raises:
        ResilientError: as ``agree`` raises it.
        DeadlineExceeded: the coordinator did not rule.
    """
    ruling = _hear(comms, topic, within_seconds)
    if isinstance(ruling, Failure):
        raise ruling.to_error(comms.world.size)
    return ruling


def _hear(comms: Comms, topic: str, within_seconds: float) -> Any | Failure:
    # The coordinator may wait for the slowest rank and then work on its ruling.
    return _parse(comms.broadcast(topic, None, 2 * within_seconds))


def _conclude(gathered: Any, rule: Callable[[list[Any]], Any]) -> Any | Failure:
    if isinstance(gathered, Failure):
        return gathered
    for rank, one in enumerate(gathered):
        if "failure" in one:
            return Failure(**one["failure"], rank=rank)
    return attempt(lambda: rule([one["value"] for one in gathered]))


def _parse(heard: dict[str, Any]) -> Any | Failure:
    if "failure" in heard:
        return Failure(**heard["failure"], rank=heard.get("rank", -1))
    return heard["value"]
