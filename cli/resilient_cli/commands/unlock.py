"""``resilient ckpt unlock``: liveness and fencing of the writer of a repository."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path  # noqa: TC003 - typer reads the signatures
from typing import TYPE_CHECKING, Annotated, Any

import typer

from resilient.checkpoint.fencing import find_writer, shut_out
from resilient.checkpoint.garbage_collection import scan_and_plan
from resilient.checkpoint.retention import Retention
from resilient.clock import SystemClock
from resilient.errors import RepositoryNotFound, WriterAlive
from resilient.goodput.event_log import present_ms
from resilient.redaction import shell_quote
from resilient_cli.liveness import LivenessState, ask_heartbeat, check_liveness, records_of
from resilient_cli.output import CommandResult, KeyValues, Waiting, show
from resilient_cli.repositories import Place, Repo, open_repository, output_of
from resilient_cli.views.goodput import moment
from resilient_cli.views.text import NONE, age, folder

if TYPE_CHECKING:
    from resilient.checkpoint.fencing import Writer
    from resilient.checkpoint.generations import Generation
    from resilient.format.keys import CheckpointId
    from resilient_cli.liveness import LivenessReport

_NAMES_MAX = 3


@dataclass(frozen=True, slots=True)
class UnlockResult:
    """State of the writer of a repository, and the action that was taken.

    Attributes:
        url: URL of the repository.
        writer: The newest attempt, as it was before the action.
        liveness: Liveness of its process.
        retention_block: Reason why garbage collection deletes nothing; empty if none.
        generation: The attempt that was started; None if nothing was changed.
        is_needed: True if there is a writer to fence off.
    """

    url: str
    writer: Writer
    liveness: LivenessReport
    retention_block: str
    generation: Generation | None
    is_needed: bool


def build_unlock_result(plan: UnlockResult, now: str) -> CommandResult:
    """Build the answer of ``ckpt unlock``."""
    writer, record = plan.writer, plan.writer.record
    document = {
        "repository": plan.url,
        "done": plan.generation is not None,
        "life": plan.generation.number if plan.generation else None,
        "state": plan.liveness.state.value,
        "why": plan.liveness.evidence,
        "writer": {
            "type": "writer",
            "life": writer.life,
            "cause": record.cause if record else None,
            "claimed_at": record.claimed_at if record else None,
            "host": record.host if record else None,
            "problem": writer.problem or None,
            "last": folder(writer.last),
            "committed_at": writer.committed_at or None,
            "unfinished": [checkpoint_id.folder for checkpoint_id in writer.unfinished],
        },
        "process": _process(plan.liveness),
        "resume": folder(_resume(plan)),
        "held": plan.retention_block or None,
    }
    blocks: tuple[KeyValues | str, ...] = (
        KeyValues(tuple(_facts(plan, now))),
        *_next_step_lines(plan),
    )
    number = plan.generation.number if plan.generation else writer.life
    return CommandResult("ckpt.unlock", "writer", document, blocks, (str(number),))


def _resume(plan: UnlockResult) -> CheckpointId | None:
    """Return the checkpoint that a resume takes now; saves during the check count."""
    return plan.generation.parent if plan.generation else plan.writer.resume


def _process(liveness: LivenessReport) -> dict[str, Any] | None:
    if liveness.agent is None:
        return None
    return {
        "host": liveness.agent.host,
        "pid": liveness.agent.pid,
        "began": moment(liveness.agent.began_ms),
        "told": moment(liveness.last_event_ms),
        "exit_code": liveness.agent.exit_code,
    }


def _facts(plan: UnlockResult, now: str) -> list[tuple[str, str]]:
    writer, record, liveness = plan.writer, plan.writer.record, plan.liveness
    claim_text = f"DAMAGED: {writer.problem}"
    if record:
        claim_text = f"{record.cause} on {record.host}, {age(record.claimed_at, now)} ago"
    last_save = f"{writer.last}, {age(writer.committed_at, now)} ago" if writer.last else NONE
    if writer.unfinished:
        names = ", ".join(checkpoint_id.folder for checkpoint_id in writer.unfinished[:_NAMES_MAX])
        last_save += f"; started and not committed: {names}"
    process = NONE
    if liveness.agent:
        event_age = age(moment(liveness.last_event_ms), now)
        process = f"pid {liveness.agent.pid} on {liveness.agent.host}, last event {event_age} ago"
    return [
        ("generation", f"{writer.life}, {claim_text}"),
        ("saved", last_save),
        ("process", process),
        ("writer", f"{liveness.state.value}: {liveness.evidence}"),
        ("resume", folder(_resume(plan)) or "scratch"),
        ("held", plan.retention_block or NONE),
    ]


def _next_step_lines(plan: UnlockResult) -> list[str]:
    if plan.generation:
        start_text = folder(_resume(plan)) or "scratch"
        return [
            f"Generation {plan.generation.number} starts from {start_text} and saves nothing.",
            "Every earlier process ends at its next save (exit 80).",
            "Nothing was abandoned or deleted. The same training command resumes from there.",
        ]
    if not plan.is_needed:
        return ["No process is left to fence: nothing was changed."]
    introduction = (
        "The same training command resumes as it is. To make sure that no other process writes:"
    )
    force = " --force" if plan.liveness.state is LivenessState.ALIVE else ""
    return [f"Dry run. {introduction} resilient ckpt unlock {plan.url} --yes{force}"]


LIVE_WRITER_FOUND = 80


def unlock(  # noqa: PLR0913 - the options of a command
    ctx: typer.Context,
    place: Place = None,
    repo: Repo = None,
    *,
    run: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Event files of the run, if they are not in REPO."),
    ] = None,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Fence the writer.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also fence a live writer, which ends at its next save.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show the state, as without --yes.")
    ] = False,
    single_writer: Annotated[
        bool, typer.Option("--single-writer", help="Promise: no other job writes to REPO.")
    ] = False,
) -> int:
    """Show which process may write to a repository, whether it is alive, and fence it with --yes.

    A dead process cannot lock a repository: the same command always starts a new generation. But a
    process of the newest generation can save until a newer generation starts, even if the process
    hangs or was forgotten. --yes starts a new generation without a save. Training resumes from the
    same checkpoint, nothing is abandoned or deleted, and every earlier process ends at its next
    save with exit code 80.

    If the writer ran on another host and left a heartbeat, the command waits up to 90 s for the
    next heartbeat.

    Exit code 0: no process is known to be alive. 80: a writer is alive and --force was not given.

    Example: resilient ckpt unlock s3://bucket/run --yes
    """
    store, clock = open_repository(place, repo, reads_unsigned=True), SystemClock()
    writer = find_writer(store)
    if writer is None:
        raise RepositoryNotFound(
            f"no repository at `{store.url}`: no run was ever started there",
            url=store.url,
            hint=f"resilient doctor --repo {shell_quote(store.url)}",
        )
    now_ms = round(datetime.fromisoformat(clock.now_iso()).timestamp() * 1000)
    records = records_of(run, place or repo or "")
    liveness = check_liveness(writer, records, present_ms(records, clock, now_ms))
    with Waiting("waiting for a heartbeat"):
        liveness = ask_heartbeat(liveness, writer, store, clock)
    is_alive = liveness.state is LivenessState.ALIVE
    is_confirmed = (yes or output_of(ctx).agrees) and not dry_run
    if is_confirmed and is_alive and not force:
        raise WriterAlive(
            f"generation {writer.life} of {store.url} has a live writer: {liveness.evidence}; "
            "nothing was changed",
            hint=f"resilient stop {shell_quote(run or store.url)}; resilient ckpt unlock "
            f"{shell_quote(store.url)} --yes --force loses its unsaved steps",
        )
    # An attempt that saves nothing already fences off every other writer.
    is_needed = not writer.is_nobody or is_alive
    generation = (
        shut_out(store, clock, single_writer=single_writer) if is_confirmed and is_needed else None
    )
    retention_block = scan_and_plan(store, Retention(keep_last=1), in_full=True).plan.held
    plan = UnlockResult(
        store.url, writer, liveness, retention_block, generation, is_needed=is_needed
    )
    show(build_unlock_result(plan, clock.now_iso()), output_of(ctx))
    return LIVE_WRITER_FOUND if is_alive and not generation else 0
