"""``resilient ckpt tag``, ``untag`` and ``prune``: tags and retention of a repository."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from resilient.checkpoint.garbage_collection import apply_plan, scan_and_plan
from resilient.checkpoint.generations import newest_claim
from resilient.checkpoint.refs import create_tag, remove_tag, resolve
from resilient.checkpoint.retention import BestOf, Retention, parse_best
from resilient.checkpoint.signed_store import require_signed
from resilient.checkpoint.trash import TrashPolicy, look_into_trash, restore_from_trash
from resilient.clock import SystemClock
from resilient.errors import ConfigError, NothingToResume, UsageError
from resilient.format.keys import parse_prune, parse_trash
from resilient.redaction import shell_quote
from resilient_cli.durations import parse_grace
from resilient_cli.output import CommandResult, KeyValues, Table, Waiting, human_size, show
from resilient_cli.repositories import (
    Place,
    Repo,
    committed_checkpoints,
    complete_ref,
    is_interactive,
    open_repository,
    output_of,
)
from resilient_cli.survey import VerifyLevel, survey
from resilient_cli.views.text import NONE, count, duration, folder, near_part_note

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.checkpoint.refs import Tag
    from resilient.checkpoint.repository_scan import RepositoryScan
    from resilient.checkpoint.retention import RotationPlan
    from resilient.checkpoint.trash import RestoredCheckpoint
    from resilient.format.keys import CheckpointId
    from resilient.storage.store import Store
    from resilient_cli.output import Output
    from resilient_cli.survey import Survey


def build_prune_result(
    url: str,
    scan: RepositoryScan,
    plan: RotationPlan,
    grace: TrashPolicy,
    *,
    is_done: bool,
    newest: Survey | None = None,
) -> CommandResult:
    """Build the answer of ``ckpt prune``.

    Args:
        url: URL of the repository.
        scan: Scan of the repository that the plan is based on.
        plan: Planned deletions; with ``is_done``, the deletions that were carried out.
        grace: Time during which deleted checkpoints can be restored.
        is_done: True if the plan was carried out.
        newest: Survey of the newest checkpoint, if it may be the reason that nothing is deleted.
    """
    freed_bytes = scan.freed_bytes if not plan.held else 0
    document = {
        "repository": url,
        "done": is_done,
        "held": plan.held,
        "unsure": plan.unsure,
        "freed_bytes": freed_bytes,
        "kept": [
            {"type": "kept", "id": checkpoint_id.folder, "reasons": list(reasons)}
            for checkpoint_id, reasons in plan.kept.items()
        ],
        "deleted": [
            {
                "type": "deleted",
                "id": checkpoint_id.folder,
                "size_bytes": scan.size_bytes([checkpoint_id]),
                "still_needed_bytes": scan.still_needed_bytes(checkpoint_id),
            }
            for checkpoint_id in plan.doomed
        ],
        "damaged": {checkpoint_id.folder: reason for checkpoint_id, reason in plan.damaged.items()},
        "grace_seconds": grace.seconds,
        "later_bytes": scan.later_bytes if not plan.held else 0,
        "prune": _prune(scan, plan) if is_done else None,
        "undo": _undo_command(url, scan, plan) or None if is_done else None,
        "emptied": [checkpoint_id.folder for checkpoint_id in sorted(scan.over, reverse=True)],
    }
    kept_rows = [
        _row(scan, checkpoint_id, "keep", "; ".join(reason))
        for checkpoint_id, reason in plan.kept.items()
    ]
    verdict = "trash" if scan.into else "delete"
    deleted_rows = [
        _row(scan, checkpoint_id, verdict, _shared_size_text(scan, checkpoint_id))
        for checkpoint_id in plan.doomed
    ]
    over = [] if plan.held else sorted(scan.over, reverse=True)
    deleted_rows += [
        _row(scan, checkpoint_id, "delete", "its time in the trash is over")
        for checkpoint_id in over
    ]
    table = Table(("STEP", "GEN", "SIZE", "PLAN", "ID", "REASONS"), (*kept_rows, *deleted_rows))
    ids = tuple(checkpoint_id.folder for checkpoint_id in plan.doomed)
    lines = (*_summary_lines(url, scan, plan, grace, is_done=is_done), *_part_of_near(newest))
    return CommandResult("ckpt.prune", "rotation", document, (table, *lines), ids)


def _part_of_near(newest: Survey | None) -> tuple[str, ...]:
    if newest is None or not newest.absent_ranks:
        return ()
    note = near_part_note(newest.checkpoint, newest.absent_ranks)
    limit = "The limit of the near tier is `near_total_limit`"
    return (f"{note} {limit}. Prune the durable repository instead.",)


def _row(
    scan: RepositoryScan, checkpoint_id: CheckpointId, verdict: str, reason: str
) -> tuple[str, ...]:
    size = human_size(scan.size_bytes([checkpoint_id]))
    return (
        str(checkpoint_id.step),
        str(checkpoint_id.generation),
        size,
        verdict,
        checkpoint_id.folder,
        reason,
    )


def _shared_size_text(scan: RepositoryScan, checkpoint_id: CheckpointId) -> str:
    """Return the size that stays because a kept checkpoint refers to these bytes."""
    size_bytes = scan.still_needed_bytes(checkpoint_id)
    return f"but other checkpoints need {human_size(size_bytes)} of it" if size_bytes else NONE


def _summary_lines(
    url: str, scan: RepositoryScan, plan: RotationPlan, grace: TrashPolicy, *, is_done: bool
) -> Iterator[str]:
    if plan.held and not plan.doomed:
        yield f"Nothing was deleted: {plan.held}."
        return
    suffix = f" Files that may still be needed stay: {plan.unsure}." if plan.unsure else ""
    freed_bytes = scan.freed_bytes if not plan.held else 0
    if scan.into and plan.doomed:
        yield from _into_trash(url, scan, plan, grace, is_done=is_done)
        if not freed_bytes and not suffix:
            return
    number = len(scan.over) + (0 if scan.into else len(plan.doomed))
    checkpoints = count(number, "checkpoint")
    if not is_done:
        yield (
            f"{checkpoints} would be deleted, {human_size(freed_bytes)}. Nothing was "
            f"deleted.{suffix}"
        )
    elif plan.held:
        yield f"{checkpoints} deleted; the others and all files stay for now: {plan.held}."
    else:
        yield f"{checkpoints} deleted, {human_size(freed_bytes)} freed.{suffix}"


def _into_trash(
    url: str, scan: RepositoryScan, plan: RotationPlan, grace: TrashPolicy, *, is_done: bool
) -> Iterator[str]:
    """Yield lines on the trash: number, size, time limit, and the command that restores it."""
    checkpoints, later_size = count(len(plan.doomed), "checkpoint"), human_size(scan.later_bytes)
    length = duration(grace.seconds * 1000)
    if not is_done:
        yield (
            f"{checkpoints} would go to the trash, {later_size} for {length}. Nothing was changed."
        )
        return
    if plan.held:
        yield f"{checkpoints} in the trash; the others and all files stay for now: {plan.held}."
    else:
        yield (
            f"{checkpoints} in the trash; a garbage collection or prune after {length} frees "
            f"{later_size}."
        )
    yield f"undo: {_undo_command(url, scan, plan)}"


def _undo_command(url: str, scan: RepositoryScan, plan: RotationPlan) -> str:
    prune = _prune(scan, plan)
    return f"resilient ckpt prune {shell_quote(url)} --undo {shell_quote(prune)}" if prune else ""


def _prune(scan: RepositoryScan, plan: RotationPlan) -> str | None:
    """Return the id that ``--undo`` takes; None if this plan put nothing into the trash."""
    mark = parse_trash(scan.into) if plan.doomed else None
    return mark.prune if mark else None


def build_undo_result(url: str, restoration: RestoredCheckpoint, *, is_done: bool) -> CommandResult:
    """Build the answer of ``ckpt prune --undo``.

    Args:
        url: URL of the repository.
        restoration: Checkpoints that were restored, or would be.
        is_done: True if they were restored.
    """
    document = {
        "repository": url,
        "done": is_done,
        "prune": restoration.prune,
        "back": [checkpoint_id.folder for checkpoint_id in restoration.back],
        "left": {
            checkpoint_id.folder: reason for checkpoint_id, reason in restoration.left.items()
        },
        "others": list(restoration.others),
    }
    rows = [
        (checkpoint_id.folder, "back" if is_done else "would be restored")
        for checkpoint_id in restoration.back
    ]
    rows += [
        (checkpoint_id.folder, f"stays in the trash: {reason}")
        for checkpoint_id, reason in restoration.left.items()
    ]
    ids = tuple(checkpoint_id.folder for checkpoint_id in restoration.back)
    blocks: tuple[Table | str, ...] = (
        Table(("ID", "IS"), tuple(rows)),
        *_undo_lines(url, restoration, is_done=is_done),
    )
    return CommandResult("ckpt.prune", "undo", document, blocks, ids)


def _undo_lines(url: str, restoration: RestoredCheckpoint, *, is_done: bool) -> Iterator[str]:
    restored_text = count(len(restoration.back), "checkpoint")
    if not (restoration.back or restoration.left):
        yield (
            f"Nothing of the prune {restoration.prune} is in the trash: it was already restored, "
            "or the trash was emptied."
        )
    elif is_done:
        yield f"{restored_text} of the prune {restoration.prune} restored from the trash."
    else:
        yield f"{restored_text} of the prune {restoration.prune} would be restored."
    if restoration.others:
        other_prunes = count(len(restoration.others), "other prune")
        next_command = (
            f"resilient ckpt prune {shell_quote(url)} --undo {shell_quote(restoration.others[0])}"
        )
        yield f"{other_prunes} in the trash; to restore the newest: {next_command}"


def build_tag_result(url: str, tag: Tag) -> CommandResult:
    """Build the answer of ``ckpt tag``."""
    checkpoint, undo = (
        tag.checkpoint.folder,
        f"resilient ckpt untag {shell_quote(tag.name)} {shell_quote(url)}",
    )
    document = {"repository": url, "name": tag.name, "id": checkpoint, "undo": undo}
    facts = KeyValues((("tag", tag.name), ("names", checkpoint), ("undo", undo)))
    return CommandResult("ckpt.tag", "tag", document, (facts,), (checkpoint,))


def build_untag_result(url: str, name: str, checkpoint: CheckpointId | None) -> CommandResult:
    """Build the answer of ``ckpt untag``; a damaged tag has lost the name of its checkpoint."""
    undo = f"resilient ckpt tag {checkpoint} {name} {shell_quote(url)}" if checkpoint else ""
    document = {"repository": url, "name": name, "id": folder(checkpoint), "undo": undo}
    facts = KeyValues(
        (("removed", name), ("named", folder(checkpoint) or NONE), ("undo", undo or NONE))
    )
    return CommandResult("ckpt.untag", "tag", document, (facts,), (name,))


ANSWER_IS_NO = 1

Name = Annotated[str, typer.Argument(metavar="NAME", help="The tag.", show_default=False)]


def tag(
    ctx: typer.Context,
    ref: Annotated[
        str,
        typer.Argument(
            metavar="REF", help="latest, step:120, best:loss, ...", autocompletion=complete_ref
        ),
    ],
    name: Name,
    place: Place = None,
    repo: Repo = None,
) -> None:
    """Give a checkpoint a name. A checkpoint with a tag is never deleted by retention or prune.

    Example: resilient ckpt tag best:loss release runs/gpt2
    """
    store = open_repository(place, repo)
    checkpoint = resolve(store, ref)
    require_signed(store, checkpoint)
    new_tag = create_tag(store, name, checkpoint, SystemClock())
    show(build_tag_result(store.url, new_tag), output_of(ctx))


def untag(ctx: typer.Context, name: Name, place: Place = None, repo: Repo = None) -> None:
    """Remove a tag; the checkpoint stays until retention or prune deletes it.

    Example: resilient ckpt untag release runs/gpt2
    """
    store = open_repository(place, repo, reads_unsigned=True)
    show(build_untag_result(store.url, name, remove_tag(store, name)), output_of(ctx))


def prune(  # noqa: PLR0913 - the options of a command
    ctx: typer.Context,
    place: Place = None,
    prune_id: Annotated[
        str | None,
        typer.Argument(
            metavar="ID",
            help="With --undo: the id that prune printed; by default the newest.",
            show_default=False,
        ),
    ] = None,
    repo: Repo = None,
    *,
    keep_last: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Keep the newest N.")
    ] = None,
    keep_best: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC:N", help="Keep the best N; add :min or :max to set the direction."
        ),
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Keep steps that are multiples of N.")
    ] = None,
    keep_hourly: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Keep the newest of N hours (UTC).")
    ] = None,
    keep_daily: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Keep the newest of N days (UTC).")
    ] = None,
    keep_weekly: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Keep the newest of N weeks (ISO 8601).")
    ] = None,
    keep_monthly: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Keep the newest of N months (UTC).")
    ] = None,
    keep_yearly: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Keep the newest of N years (UTC).")
    ] = None,
    keep_within: Annotated[
        str | None,
        typer.Option(
            metavar="2d", help="Keep checkpoints saved within this time before the newest."
        ),
    ] = None,
    keep_tag: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Keep checkpoints with this tag; tagged checkpoints always stay."
        ),
    ] = None,
    level: Annotated[
        VerifyLevel,
        typer.Option(
            help="Verification of the newest checkpoint before a deletion: quick or full."
        ),
    ] = VerifyLevel.QUICK,
    forget_undo: Annotated[
        bool,
        typer.Option("--forget-undo", help="Keep no checkpoint only because `ckpt undo` needs it."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")] = False,
    grace: Annotated[
        str,
        typer.Option(
            metavar="24h", help="Time in which pruned checkpoints can be restored; 0 for none."
        ),
    ] = "24h",
    empty_trash: Annotated[bool, typer.Option("--empty-trash", help="Free the trash now.")] = False,
    undo: Annotated[
        bool,
        typer.Option("--undo", help="Restore the checkpoints of prune ID, or of the newest prune."),
    ] = False,
) -> int:
    """Delete checkpoints that no policy keeps, and show why each other checkpoint stays.

    A checkpoint stays if any rule keeps it. These always stay: the newest checkpoint, checkpoints
    with a tag or protected by the run, the checkpoint from which a generation has just started, and
    the target of `ckpt undo`. Nothing is deleted while the newest checkpoint is damaged.

    Deleted checkpoints go to the trash first. Commands do not list the trash, and runs do not
    resume from it. --undo restores all checkpoints of one prune: of the given ID, or of the newest
    prune. --undo can be repeated. After --grace the next garbage collection or prune frees the
    bytes.

    Exit code 0: done. 1: the checkpoints could not be deleted, or not all of them were restored.

    Example: resilient ckpt prune runs/gpt2 --keep-last 3 --keep-best loss:2 --dry-run
    """
    retention = Retention(
        keep_last=keep_last,
        keep_best=tuple(map(_best, keep_best or ())),
        keep_every=keep_every,
        keep_hourly=keep_hourly,
        keep_daily=keep_daily,
        keep_weekly=keep_weekly,
        keep_monthly=keep_monthly,
        keep_yearly=keep_yearly,
        keep_within=keep_within,
        keep_tags=tuple(keep_tag or ()),
        verify_before_rotate="quick" if level is VerifyLevel.QUICK else "full",
        rolled_back="none" if forget_undo else "undo",
    )
    output = output_of(ctx)
    if undo:
        _require_alone(retention, empties=empty_trash)
        place, prune_of_trash = _place_and_id(place, prune_id)
        return _undo(
            open_repository(place, repo, reads_unsigned=True),
            prune_of_trash,
            output,
            dry_run=dry_run,
        )
    if prune_id:
        raise UsageError(
            f"`{prune_id}`: only `--undo` takes the id of a prune",
            hint="resilient ckpt prune REPO --undo ID",
        )
    if not empty_trash:
        _require_policy(retention)
    asks = not (dry_run or output.agrees)
    time = TrashPolicy(SystemClock(), parse_grace(grace, "--grace"), empty_trash)
    store = open_repository(place, repo, reads_unsigned=True)
    return _apply_retention(store, retention, time, output, asks=asks, dry_run=dry_run)


def _apply_retention(
    store: Store,
    retention: Retention,
    time: TrashPolicy,
    output: Output,
    *,
    asks: bool,
    dry_run: bool,
) -> int:
    """Apply a retention policy, or show its plan; return 1 if it is held or declined."""
    checkpoints = committed_checkpoints(store)
    # Read before the plan: after a restore from a backup, the same number has another token.
    claim, token = newest_claim(store)
    with Waiting("reading"):
        scan = scan_and_plan(store, retention, in_full=True, grace=time)
    _require_tags(retention, scan, store.url)
    plan = scan.plan
    if asks and (plan.doomed or scan.over):
        show(build_prune_result(store.url, scan, plan, time, is_done=False), output)
        _require_user(output)
        if not typer.confirm(_question(scan), err=True):
            return ANSWER_IS_NO
    if not dry_run:
        with Waiting("deleting"):
            plan = apply_plan(store, scan, claim, token)
    newest = survey(store, checkpoints[:1], VerifyLevel.QUICK) if plan.held else []
    reason = newest[0] if newest else None
    show(
        build_prune_result(store.url, scan, plan, time, is_done=not dry_run, newest=reason), output
    )
    return ANSWER_IS_NO if plan.held else 0


def _question(scan: RepositoryScan) -> str:
    deletion_count = len(scan.plan.doomed)
    if scan.into and not scan.over:
        return f"Put {deletion_count} in the trash?"
    return f"Delete {len(scan.over) + (0 if scan.into else deletion_count)}?"


def _place_and_id(place: str | None, prune_id: str | None) -> tuple[str | None, str]:
    """Return the repository and the id of a prune; the arguments may have either order.

    Raises:
        UsageError: The arguments are not one repository and one id.
    """
    words = [word for word in (place, prune_id) if word]
    ids = [word for word in words if parse_prune(word)]
    places = [word for word in words if word not in ids]
    if len(ids) > 1 or len(places) > 1:
        raise UsageError(
            f"`{words[1]}` is not the id of a prune, as `prune` and `ckpt ls` show it",
            hint="resilient ckpt prune REPO --undo ID",
        )
    return next(iter(places), None), next(iter(ids), "")


def _undo(store: Store, prune: str, output: Output, *, dry_run: bool) -> int:
    """Restore what a prune deleted; return 1 if a part no longer exists."""
    restoration = look_into_trash(store, prune) if dry_run else restore_from_trash(store, prune)
    if not (restoration.back or restoration.left):
        _require_undone(store, prune)
    show(build_undo_result(store.url, restoration, is_done=not dry_run), output)
    return ANSWER_IS_NO if restoration.left else 0


def _require_undone(store: Store, prune: str) -> None:
    """Refuse an undo if the prune has nothing in the trash, and its time there is over.

    If its time is not over, the prune was already undone, or the trash was emptied.

    Raises:
        NothingToResume: The time of the prune in the trash is over.
    """
    mark = parse_prune(prune)
    if mark is None or mark.until <= SystemClock().now_iso():
        raise NothingToResume(
            f"nothing of the prune {prune} is in the trash of {store.url}: its time is over",
            hint=f"resilient ckpt ls {shell_quote(store.url)}",
        )


def _require_alone(retention: Retention, *, empties: bool) -> None:
    """Refuse retention options together with ``--undo``, which would ignore them.

    Raises:
        UsageError: Such an option was given.
    """
    if empties or not retention.is_empty:
        raise UsageError(
            "`--undo` restores the checkpoints of a prune, and excludes policies",
            hint="resilient ckpt prune REPO --undo",
        )


def _require_policy(retention: Retention) -> None:
    """Require a retention policy.

    Raises:
        UsageError: No policy was given.
    """
    if retention.is_empty:
        raise UsageError(
            "no policy was given, so prune cannot decide what to delete",
            hint="resilient ckpt prune --keep-last 3 --dry-run",
        )


def _require_user(output: Output) -> None:
    """Require a user who can confirm the plan that was shown.

    Raises:
        UsageError: No user is present.
    """
    if not is_interactive(output):
        raise UsageError(
            "prune deletes, and no terminal is there to confirm it; nothing was deleted: `--yes` "
            "carries out the plan",
            hint="resilient ckpt prune --yes",
        )


def _require_tags(retention: Retention, scan: RepositoryScan, url: str) -> None:
    """Require that every tag of a policy exists: a wrong name would keep nothing.

    Raises:
        UsageError: A tag does not exist.
    """
    unknown_tags = [name for name in retention.keep_tags if name not in (scan.tags or ())]
    if unknown_tags:
        raise UsageError(
            f"no tag `{unknown_tags[0]}` at {url}", hint=f"resilient ckpt ls {shell_quote(url)}"
        )


def _best(option: str) -> BestOf:
    try:
        return parse_best(option)
    except ConfigError as error:
        hint = "resilient ckpt prune --keep-best loss:3:min --dry-run"
        raise UsageError(error.message, hint=hint) from error
