"""The answer of ``status``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.accounting.account import SILENT_MS
from resilient_cli.render import Answer, Facts
from resilient_cli.views.accounting import moment
from resilient_cli.views.words import NONE, count, duration, share

if TYPE_CHECKING:
    from resilient.accounting.account import Account

_SILENT, _DEAD = "silent", "dead"
_MEANING = {_DEAD: " (its launcher is gone without a word; the same command goes on)"}


def standing(found: Account, now_ms: int, *, is_dead: bool = False) -> Answer:
    """Return the answer of ``status``.

    Args:
        found: the account of the run.
        now_ms: what time it is, in milliseconds since 1970.
        is_dead: whether its launcher is known to be gone.
    """
    now, saved = found.now, found.saved[-1] if found.saved else None
    left = max(0, now.max_steps - now.step)
    left_ms = 1000 * left / now.steps_per_second if now.steps_per_second else None
    state = _state(found, now_ms, is_dead=is_dead)
    is_moving = now.exit_code is None and state not in (_SILENT, _DEAD)
    document = {
        "state": state,
        "exit_code": now.exit_code,
        "step": now.step,
        "max_steps": now.max_steps,
        "steps_per_second": now.steps_per_second,
        "left_ms": left_ms,
        "told": moment(now.told_ms),
        "lives": len(found.doings),
        "ranks": _ranks(found),
        "faults": {cause: one.count for cause, one in found.repairs.items()},
        "lost_steps": found.lost_steps,
        "checkpoint": saved.checkpoint if saved else None,
        "committed": moment(saved.at_ms) if saved else None,
        "risk_steps": found.risk_steps,
        "wall_ms": found.wall_ms,
        "goodput": found.goodput,
    }
    of = f" of {now.max_steps} ({share(now.step, now.max_steps)})" if now.max_steps else ""
    speed = f", {now.steps_per_second:.3g} steps/s" if now.steps_per_second else ""
    eta = f", {duration(left_ms)} left" if left and left_ms and is_moving else ""
    causes = ", ".join(f"{cause} {one.count}" for cause, one in found.repairs.items())
    ranks = f", {count(_ranks(found), 'rank')}" if _ranks(found) else ""
    durable = (
        f"{saved.checkpoint}, {duration(now_ms - saved.at_ms)} ago; "
        f"{count(found.risk_steps, 'step')} at risk"
        if saved
        else f"nothing yet; {count(found.risk_steps, 'step')} at risk"
    )
    pairs = (
        ("state", f"{state}{_MEANING.get(state, '')}"),
        ("step", f"{now.step}{of}{speed}{eta}"),
        ("life", f"{len(found.doings)}{ranks}"),
        ("faults", f"{causes or NONE}; {count(found.lost_steps, 'step')} lost"),
        ("durable", durable),
        ("goodput", f"{share(found.goodput, 1)} of {duration(found.wall_ms)}"),
        ("told", f"{duration(max(0, now_ms - now.told_ms))} ago"),
    )
    return Answer("status", "status", document, (Facts(pairs),), (str(now.step),))


def _ranks(found: Account) -> int:
    """Return the ranks of the newest life, 0 if nobody said."""
    return found.doings[-1].life.world_size if found.doings else 0


def _state(found: Account, now_ms: int, *, is_dead: bool) -> str:
    now = found.now
    if now.exit_code is not None:
        return "done" if now.exit_code == 0 else f"left with exit code {now.exit_code}"
    if now.is_done and not found.launches:
        return "done"
    if is_dead:
        return _DEAD
    if now_ms - now.told_ms > SILENT_MS:
        return _SILENT
    return found.intervals[-1].spent.value if found.intervals else "starting"
