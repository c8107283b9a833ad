"""The answers of ``chaos run`` and ``chaos list``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from resilient.testing.chaos.host import name_of
from resilient.testing.chaos.promises import State, is_proven
from resilient_cli.render import Answer, Facts, Table
from resilient_cli.views.words import NONE, count, duration, folder, share

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from resilient.testing.chaos.evidence import Evidence, Struck
    from resilient.testing.chaos.faults import ChaosPlan, Strike
    from resilient.testing.chaos.promises import Promise
    from resilient.testing.chaos.rehearsal import Rehearsal


def listing(plans: Sequence[ChaosPlan], reasons: Mapping[str, Mapping[str, str]]) -> Answer:
    """Return the plans that are shipped, and why some cannot be carried out."""
    document = {
        "plans": [
            {
                "name": one.name,
                "description": one.description,
                "faults": sum(fault.count for fault in one.faults),
                "impossible": dict(reasons[one.name]),
            }
            for one in plans
        ]
    }
    rows = tuple(
        (
            one.name,
            str(sum(fault.count for fault in one.faults)),
            "; ".join(reasons[one.name].values()) or "can be run here",
            one.description,
        )
        for one in plans
    )
    table = Table(("PLAN", "FAULTS", "HERE", "WHAT"), rows)
    return Answer("chaos.list", "plans", document, (table,), tuple(one.name for one in plans))


def planned(
    plan: ChaosPlan, strikes: Sequence[Strike], seed: int, again: str, hosts: int = 1
) -> Answer:
    """Return what would be done."""
    document = {
        "plan": plan.name,
        "seed": seed,
        "hosts": hosts,
        "command": again,
        "faults": [
            {"at": round(one.share, 4), **_fault(one), "host": _host(one, hosts)} for one in strikes
        ],
    }
    rows = tuple((share(one.share, 1), *_cells(one, hosts)) for one in strikes)
    several = (("hosts", str(hosts)),) if hosts > 1 else ()
    facts = Facts((("plan", plan.name), ("seed", str(seed)), *several, ("command", again)))
    table = Table(("AT", "FAULT", "TARGET", "SECONDS"), rows)
    return Answer("chaos.run", "plan", document, (facts, table))


def verdict(wish: Rehearsal, evidence: Evidence, promises: Sequence[Promise], again: str) -> Answer:
    """Return what happened, what was kept, and the command that makes it again."""
    is_kept = is_proven(evidence, promises)
    document = {
        "plan": wish.plan.name,
        "seed": wish.seed,
        "hosts": wish.hosts,
        "kept": is_kept,
        "steps": evidence.calm.step,
        "faults": [_struck(one) for one in evidence.struck],
        "missed": [_fault(one) for one in evidence.missed],
        "promises": [asdict(one) for one in promises],
        "differences": list(evidence.ended.differences),
        "command": again,
        "folder": str(wish.folder),
    }
    faults = Table(
        ("STEP", "FAULT", "EXIT", "LOST", "BEGAN FROM", "GOES ON AFTER"),
        tuple(map(_row, evidence.struck)),
    )
    judged = Table(
        ("PROMISE", "STATE", "WHAT"),
        tuple((one.name, str(one.state), _sentence(one)) for one in promises),
    )
    closing = _closing(wish, evidence, promises, again)
    return Answer("chaos.run", "verdict", document, (faults, judged, "", *closing))


def _fault(strike: Strike) -> dict[str, Any]:
    fault = strike.fault
    return {
        "kind": str(fault.kind),
        "target": str(fault.target) if fault.kind == "kill" else None,
        "in_save": fault.in_save,
        "seconds": fault.seconds or None,
    }


def _host(strike: Strike, hosts: int) -> str | None:
    """Return the host that a strike is for; a rank's is not known before it is struck."""
    is_known = hosts > 1 and strike.fault.is_of_host
    return name_of(strike.host(hosts)) if is_known else None


def _cells(strike: Strike, hosts: int) -> tuple[str, str, str]:
    fault, host = strike.fault, _host(strike, hosts)
    target = str(fault.target) if fault.kind == "kill" else ""
    if host:
        target = f"agent of {host}" if target == "agent" else host
    saving = " while it saves" * fault.in_save
    seconds = f"{fault.seconds:g}" * bool(fault.seconds)
    return str(fault.kind), f"{target}{saving}" or NONE, seconds


def _struck(one: Struck) -> dict[str, Any]:
    return {
        **_fault(one.strike),
        "host": None if one.host is None else name_of(one.host),
        "what": one.what,
        "step": one.step,
        "exit": one.code,
        "ends": [{"host": name_of(end.host), "exit": end.code} for end in one.ends],
        "lost_steps": one.lost_steps,
        "newest_before": folder(one.before),
        "restored": folder(one.restored),
        "recovery_seconds": round(one.seconds, 3),
        "problem": one.problem,
    }


def _row(one: Struck) -> tuple[str, ...]:
    began = (str(one.restored or "scratch")) if one.is_new_life else NONE
    after = one.problem or duration(1000 * one.seconds)
    ends = "; ".join(f"{name_of(end.host)} {end.code}" for end in one.ends)
    code = ends or (NONE if one.code is None else str(one.code))
    return str(one.step), one.what, code, str(one.lost_steps), began, after


def _sentence(one: Promise) -> str:
    return f"{one.text}: {one.why}" if one.why else one.text


def _closing(
    wish: Rehearsal, evidence: Evidence, promises: Sequence[Promise], again: str
) -> list[str]:
    broken = [one.name for one in promises if one.state is State.BROKEN]
    kept = sum(one.state is State.KEPT for one in promises)
    lines = []
    if evidence.missed:
        lines.append(
            f"{count(len(evidence.missed), 'fault')} did not strike: the run was over before."
        )
    if "exact" in broken:
        lines.append(
            "If plan `calm`, without any fault, differs as well, the script itself is not "
            "deterministic: an unseeded random stream, the time of day, the order of a set."
        )
    said = (
        f"{kept} promises kept, {len(broken)} broken, {len(promises) - kept - len(broken)} untested"
    )
    ending = f": BROKEN {', '.join(broken)}" if broken else ""
    return [
        *lines,
        f"{said}{ending}. What was said lies in {wish.folder}.",
        f"again: {again}",
    ]
