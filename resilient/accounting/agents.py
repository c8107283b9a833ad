"""Which launchers of a run have begun and not said that they end (pure)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resilient.accounting.records import Record

_ENDS = ("RunEnded", "RunGivenUp")


@dataclass(frozen=True, slots=True)
class Agent:
    """A launcher, as its events tell.

    Attributes:
        host: the machine that it runs on.
        pid: its process there.
        began_ms: its first word.
        boot: the start of its machine at which that was; empty where it did not tell.
        since_boot_ms: how long after that, by seconds that nobody can set.
        exit_code: what it said at its end; None while it has not.
        reason: of its end.
    """

    host: str
    pid: int
    began_ms: int
    exit_code: int | None = None
    reason: str = ""
    boot: str = ""
    since_boot_ms: int = 0


def agents(records: Iterable[Record]) -> list[Agent]:
    """Return the launchers of a run in the order in which they began.

    One that was killed never said that it ends: only its host knows whether it lives.

    Args:
        records: by time.
    """
    found: dict[tuple[str, int], Agent] = {}
    for one in records:
        host, _, number = one.agent.rpartition(":")
        if not host or not number.isdigit():
            continue
        key = (host, int(number))
        if one.event == "AgentStarted" or key not in found:
            found.pop(key, None)  # its number was another's once
            boot = one.text("boot") if one.number("monotonic", -1.0) >= 0.0 else ""
            since_boot_ms = one.milliseconds("monotonic")
            found[key] = Agent(*key, one.at_ms, boot=boot, since_boot_ms=since_boot_ms)
        if one.event in _ENDS:
            code = int(one.number("exit_code", 1))
            found[key] = replace(found[key], exit_code=code, reason=one.text("reason"))
    return list(found.values())
