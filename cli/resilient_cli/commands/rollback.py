"""``resilient ckpt rollback``, ``undo`` and ``reflog``: moves of the resume point."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from resilient.checkpoint.reflog import Reflog
from resilient.checkpoint.refs import resolve
from resilient.checkpoint.rollback import apply_rollback, plan_rollback, plan_undo
from resilient.checkpoint.signed_store import require_signed
from resilient.clock import SystemClock
from resilient.errors import UsageError
from resilient.redaction import shell_quote
from resilient_cli.output import CommandResult, KeyValues, Table, show
from resilient_cli.repositories import (
    Place,
    Ref,
    Repo,
    TakeOver,
    committed_checkpoints,
    open_repository,
    output_of,
    ref_and_place,
    refuse_beside_writer,
)
from resilient_cli.views.text import NONE, age, folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from resilient.checkpoint.reflog import ReflogEntry, ReflogHead
    from resilient.checkpoint.rollback import RollbackPlan
    from resilient.storage.store import Store


def render_move(
    command: str, url: str, plan: RollbackPlan, number: int | None, *, dry_run: bool
) -> CommandResult:
    """Build the answer of ``ckpt rollback`` or ``ckpt undo``.

    Args:
        command: Dotted name of the command.
        url: URL of the repository.
        plan: The move.
        number: Number of the attempt that the command started; None if nothing was changed.
        dry_run: True if nothing was to be changed.
    """
    undo = _undo_command(url, plan) if number or (dry_run and plan.is_needed) else ""
    document = {
        "repository": url,
        "done": number is not None,
        "life": number,
        "before": folder(plan.before),
        "after": plan.after.folder,
        "undoes": plan.undoes or None,
        "abandoned": [checkpoint_id.folder for checkpoint_id in plan.left],
        "undo": undo,
    }
    ids = (plan.after.folder,)
    return CommandResult(command, "move", document, tuple(_note_blocks(plan, number, undo)), ids)


def _undo_command(url: str, plan: RollbackPlan) -> str:
    """Return the command that reverts this move."""
    if plan.undoes and plan.before:
        return f"resilient ckpt rollback {shell_quote(plan.before)} {shell_quote(url)}"
    return f"resilient ckpt undo {shell_quote(url)}"


def _note_blocks(plan: RollbackPlan, number: int | None, undo: str) -> Iterator[KeyValues | str]:
    if not plan.is_needed:
        yield f"latest is already {plan.after}. Nothing was changed."
        return
    previous_name = folder(plan.before) or "scratch"
    yield KeyValues(
        (
            ("latest", f"{previous_name} -> {plan.after}"),
            ("abandoned", _some_names(plan)),
            ("undo", undo),
        )
    )
    if number:
        yield "Nothing was deleted. A run that still trains here ends at its next save (exit 80)."
    else:
        yield "Dry run: nothing was changed."


def _some_names(plan: RollbackPlan) -> str:
    if not plan.left:
        return NONE
    names = ", ".join(checkpoint_id.folder for checkpoint_id in plan.left[:3])
    remaining = len(plan.left) - 3
    return f"{names} and {remaining} more" if remaining > 0 else names


def moves(url: str, entries: Sequence[ReflogEntry], now: str) -> CommandResult:
    """Build the answer of ``ckpt reflog``."""
    document = {
        "repository": url,
        "moves": [
            {
                "type": "move",
                "ref": _ref(move),
                "life": move.number,
                "cause": move.life.cause if move.life else None,
                "claimed_at": move.life.claimed_at if move.life else None,
                "host": move.life.host if move.life else None,
                "began_from": folder(move.life.parent) if move.life else None,
                "head": folder(move.head.checkpoint),
                "gone": move.head.gone,
            }
            for move in entries
        ],
    }
    rows = tuple(_row(move, now) for move in entries)
    table = Table(("REF", "GEN", "CAUSE", "AGE", "STARTED FROM", "HEAD"), rows)
    return CommandResult("ckpt.reflog", "moves", document, (table,), tuple(map(_ref, entries)))


def _ref(move: ReflogEntry) -> str:
    return f"@{{{move.back}}}"


def _row(move: ReflogEntry, now: str) -> tuple[str, ...]:
    if move.life is None:
        claim_cells: tuple[str, ...] = ("DAMAGED", NONE, NONE)
    else:
        start_text = folder(move.life.parent) or "scratch"
        claim_cells = (move.life.cause, age(move.life.claimed_at, now), start_text)
    return (_ref(move), str(move.number), *claim_cells, _head(move.head))


def _head(head: ReflogHead) -> str:
    return head.gone or folder(head.checkpoint) or "scratch"


DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")]
SingleWriter = Annotated[
    bool,
    typer.Option("--single-writer", help="Promise: no two jobs write to the repository at once."),
]


def rollback(  # noqa: PLR0913 - the options of a command
    ctx: typer.Context,
    ref: Ref,
    place: Place = None,
    repo: Repo = None,
    *,
    dry_run: DryRun = False,
    single_writer: SingleWriter = False,
    take_over: TakeOver = False,
) -> None:
    """Resume training from an older checkpoint. Nothing is copied and nothing is deleted.

    A new generation of the run starts from REF. Later checkpoints are abandoned: no run resumes
    from them by default, `ckpt prune` deletes them, and `ckpt undo` restores them.

    A live writer would end at its next save, with exit code 80. The command is therefore refused
    with 80 if a live writer is found; --take-over overrides the refusal.

    Example: resilient ckpt rollback step:12000 s3://bucket/run
    """
    ref, place = ref_and_place(ref, place, repo)
    if ref is None:
        raise UsageError(
            "rollback takes a checkpoint first, and then the repository",
            hint=f"resilient ckpt rollback latest~1 {shell_quote(place)}",
        )
    store = open_repository(place, repo)
    target = resolve(store, ref)
    require_signed(store, target)
    plan = plan_rollback(store, target)
    if not dry_run and not take_over and plan.is_needed:
        command = (
            f"resilient ckpt rollback {shell_quote(target)} {shell_quote(store.url)} --take-over"
        )
        refuse_beside_writer(store, command)
    _carry_out("ckpt.rollback", ctx, store, plan, dry_run=dry_run, single_writer=single_writer)


def undo(
    ctx: typer.Context,
    place: Place = None,
    repo: Repo = None,
    *,
    dry_run: DryRun = False,
    single_writer: SingleWriter = False,
    take_over: TakeOver = False,
) -> None:
    """Revert the newest rollback in force; run it again to revert the previous rollback.

    Training resumes from the checkpoint that was current before the rollback. Checkpoints saved
    since the rollback are abandoned, but not deleted. The command is refused beside a live writer,
    like `rollback`.

    Example: resilient ckpt undo s3://bucket/run
    """
    store = open_repository(place, repo)
    committed_checkpoints(store)
    plan = plan_undo(store)
    if not dry_run and not take_over and plan.is_needed:
        refuse_beside_writer(store, f"resilient ckpt undo {shell_quote(store.url)} --take-over")
    _carry_out("ckpt.undo", ctx, store, plan, dry_run=dry_run, single_writer=single_writer)


def reflog(ctx: typer.Context, place: Place = None, repo: Repo = None) -> None:
    """List the generations of the run, newest first: cause, start and end of each.

    REF names the end of a generation, for any command: `ckpt rollback @{2}`.

    Example: resilient ckpt reflog s3://bucket/run
    """
    store = open_repository(place, repo)
    committed_checkpoints(store)
    entries = Reflog(store).newest_first()
    show(moves(store.url, entries, SystemClock().now_iso()), output_of(ctx))


def _carry_out(
    command: str,
    ctx: typer.Context,
    store: Store,
    plan: RollbackPlan,
    *,
    dry_run: bool,
    single_writer: bool,
) -> None:
    number = None
    if not dry_run:
        number = apply_rollback(store, plan, SystemClock(), single_writer=single_writer)
    show(render_move(command, store.url, plan, number, dry_run=dry_run), output_of(ctx))
