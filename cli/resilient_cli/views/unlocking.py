"""The answer of ``ckpt unlock``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resilient_cli.render import Answer, Facts
from resilient_cli.views.accounting import moment
from resilient_cli.views.words import NONE, age, folder
from resilient_cli.witness import State

if TYPE_CHECKING:
    from resilient.format.names import CheckpointId
    from resilient.vault.registry.generations import Generation
    from resilient.vault.writers import Writer
    from resilient_cli.witness import Testimony

_FEW = 3


@dataclass(frozen=True, slots=True)
class Unlocking:
    """What was found, and what was done.

    Attributes:
        url: the repository.
        writer: the newest life, as it was before.
        seen: what is known of its process.
        held: why rotation deletes nothing, as it is afterwards; empty if nothing holds it.
        life: the one that was begun; None if nothing was changed.
        is_needed: whether there is anybody to shut out.
    """

    url: str
    writer: Writer
    seen: Testimony
    held: str
    life: Generation | None
    is_needed: bool


def unlocking(found: Unlocking, now: str) -> Answer:
    """Return the answer of ``ckpt unlock``."""
    writer, record = found.writer, found.writer.record
    document = {
        "repository": found.url,
        "done": found.life is not None,
        "life": found.life.number if found.life else None,
        "state": found.seen.state.value,
        "why": found.seen.why,
        "writer": {
            "type": "writer",
            "life": writer.life,
            "cause": record.cause if record else None,
            "claimed_at": record.claimed_at if record else None,
            "host": record.host if record else None,
            "problem": writer.problem or None,
            "last": folder(writer.last),
            "committed_at": writer.committed_at or None,
            "unfinished": [one.folder for one in writer.unfinished],
        },
        "process": _process(found.seen),
        "resume": folder(_resume(found)),
        "held": found.held or None,
    }
    blocks: tuple[Facts | str, ...] = (Facts(tuple(_facts(found, now))), *_told(found))
    number = found.life.number if found.life else writer.life
    return Answer("ckpt.unlock", "writer", document, blocks, (str(number),))


def _resume(found: Unlocking) -> CheckpointId | None:
    """Return what resume takes now: what was saved while it was looked at counts."""
    return found.life.parent if found.life else found.writer.resume


def _process(seen: Testimony) -> dict[str, Any] | None:
    if seen.agent is None:
        return None
    return {
        "host": seen.agent.host,
        "pid": seen.agent.pid,
        "began": moment(seen.agent.began_ms),
        "told": moment(seen.told_ms),
        "exit_code": seen.agent.exit_code,
    }


def _facts(found: Unlocking, now: str) -> list[tuple[str, str]]:
    writer, record, seen = found.writer, found.writer.record, found.seen
    began = f"DAMAGED: {writer.problem}"
    if record:
        began = f"{record.cause} on {record.host}, {age(record.claimed_at, now)} ago"
    saved = f"{writer.last}, {age(writer.committed_at, now)} ago" if writer.last else NONE
    if writer.unfinished:
        few = ", ".join(one.folder for one in writer.unfinished[:_FEW])
        saved += f"; begun and not committed: {few}"
    process = NONE
    if seen.agent:
        told = age(moment(seen.told_ms), now)
        process = f"pid {seen.agent.pid} on {seen.agent.host}, last heard {told} ago"
    return [
        ("life", f"{writer.life}, {began}"),
        ("saved", saved),
        ("process", process),
        ("writer", f"{seen.state.value}: {seen.why}"),
        ("resume", folder(_resume(found)) or "scratch"),
        ("held", found.held or NONE),
    ]


def _told(found: Unlocking) -> list[str]:
    if found.life:
        began = folder(_resume(found)) or "scratch"
        return [
            f"life {found.life.number} begins from {began} and saves nothing.",
            "Whatever wrote before ends at its next save (exit 80).",
            "Nothing was abandoned or deleted. The command that trained goes on from there.",
        ]
    if not found.is_needed:
        return ["Nobody is left to shut out: nothing was changed."]
    lead = "The same command trains on as it is; to be sure that nothing else writes:"
    force = " --force" if found.seen.state is State.ALIVE else ""
    return [f"Only looked. {lead} resilient ckpt unlock {found.url} --yes{force}"]
