"""``resilient ckpt repair``: repair of checkpoints, and the losses that remain.

The command repairs checkpoints of this project in place. A repair of another tool's checkpoint
writes a new checkpoint.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path  # noqa: TC003 - typer reads the signatures
from typing import TYPE_CHECKING, Annotated, Any

import typer

from resilient.checkpoint.refs import resolve
from resilient.checkpoint.repair import apply_repair, plan_repair
from resilient.checkpoint.signing import check_signature
from resilient.checkpoint.verified_read import join_names
from resilient.distributed.launch_env import read_storage_options
from resilient.errors import (
    KeyNotFound,
    NoIntactCheckpoint,
    RepositoryNotFound,
    SignatureRefused,
    UsageError,
)
from resilient.format.keys import parse_checkpoint
from resilient.layouts.incomplete import is_empty
from resilient.layouts.model import Remedy
from resilient.layouts.resumability import reasons
from resilient.redaction import shell_quote
from resilient.storage.folder import open_folder
from resilient.storage.open import open_store
from resilient_cli.foreign import find_in_run, is_foreign
from resilient_cli.output import CommandResult, Progress, Table, Waiting, show
from resilient_cli.repositories import (
    Place,
    Ref,
    Repo,
    committed_checkpoints,
    local_path,
    open_repository,
    output_of,
    ref_and_place,
    signing_policy,
)
from resilient_cli.store_wrappers import ProgressStore
from resilient_cli.survey import VerifyLevel, first_intact
from resilient_cli.views.foreign import conclusion, resumable
from resilient_cli.views.text import NONE, count, folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from resilient.checkpoint.repair import RepairPlan, RepairStep, UnrepairableFile
    from resilient.format.keys import CheckpointId
    from resilient.layout_repair.plan import LayoutRepairPlan
    from resilient.layouts.model import Resumability
    from resilient.storage.store import Store
    from resilient.train.hf_interop.rebuild import RebuildPlan

_SHOWN_MAX = 6


def build_layout_repair_result(
    plan: LayoutRepairPlan, target: Path, command: str, *, is_done: bool
) -> CommandResult:
    """Build the answer of ``ckpt repair`` about a checkpoint of another tool.

    Args:
        plan: Repairs and losses.
        target: Path of the new checkpoint.
        command: Command that writes the new checkpoint.
        is_done: True if the new checkpoint was written.
    """
    document = {
        "url": plan.url,
        "layout": plan.layout,
        "done": is_done,
        "whole": plan.is_whole,
        "mended": plan.is_repaired,
        "target": str(target) if plan.is_repaired or plan.salvaged else None,
        "steps": [{"type": "step", **asdict(step)} for step in plan.steps],
        "losses": dict(plan.losses),
        "refused": dict(plan.refused),
        "salvaged": [_salvage_to_json(part) for part in plan.salvaged if not plan.is_repaired],
        "resumable": {"answer": plan.verdict.answer, "why": list(plan.verdict.why)},
    }
    rows = [
        (step.file, "repaired" if is_done else "repair", step.what, step.source)
        for step in plan.steps
    ]
    rows += [(name, "LOST", follows, NONE) for name, follows in plan.losses.items()]
    rows += [(name, "stays", reason, NONE) for name, reason in plan.refused.items()]
    table = Table(("WHAT", "PLAN", "HOW, OR WHAT FOLLOWS", "FROM"), tuple(rows))
    blocks: tuple[Table | str, ...] = (table, *_lines(plan, target, is_done=is_done))
    if not is_done and (plan.is_repaired or plan.salvaged):
        blocks = (*blocks, f"To write it: {command}")
    return CommandResult("ckpt.repair-foreign", "mending", document, blocks, (str(target),))


def _salvage_to_json(part: Any) -> dict[str, Any]:
    intact_tensors = [tensor.name for tensor in part.saved]
    return {"type": "salvaged", "file": part.file, "whole": intact_tensors, "lost": list(part.lost)}


def _lines(plan: LayoutRepairPlan, target: Path, *, is_done: bool) -> Iterator[str]:
    if not plan.steps and not plan.refused and not plan.is_hopeless:
        loss_text = "; ".join(plan.verdict.why)
        if loss_text and plan.is_damaged:
            yield (
                f"{plan.url} is damaged: a resume loses {loss_text}. "
                "No repair is possible from here."
            )
        elif loss_text:
            yield f"Nothing of {plan.url} is damaged."
            yield f"It lacks {loss_text}, and no source has it."
        else:
            yield from _intact_lines(plan)
        return
    if plan.is_repaired:
        losses_note = "; its repaired.json lists what is lost" if plan.losses else ""
        verb = "is in" if is_done else "would be in"
        yield f"A new checkpoint {verb} {target}{losses_note}. {plan.url} is only read."
        yield from _remaining_notes(plan)
    elif plan.salvaged:
        yield from _loss_lines(plan, target, is_done=is_done)
    else:
        yield "Nothing can be repaired, and nothing was changed."
        if plan.verdict.lost:
            lost_text = "; ".join(plan.verdict.lost)
            yield f"A resume continues with the loss of {lost_text}: {plan.verdict.command}"


def _remaining_notes(plan: LayoutRepairPlan) -> Iterator[str]:
    """Yield the notes on the damaged checkpoint that its repaired copy still has."""
    for problem in plan.remaining:
        if problem.severity == "note" and problem.cure is not Remedy.NEEDLESS:
            yield f"note: {problem.place}: {problem.what}"


def _intact_lines(plan: LayoutRepairPlan) -> Iterator[str]:
    """Yield the line on an intact checkpoint, and the damage of files that no resume reads."""
    notes = [problem for problem in plan.before if problem.cure is Remedy.NEEDLESS]
    if not notes:
        yield f"{plan.url} is intact: nothing to repair."
        return
    yield f"All that a resume of {plan.url} reads is intact: nothing to repair."
    for problem in notes:
        yield f"note: {problem.place}: {problem.what}"


def _loss_lines(plan: LayoutRepairPlan, target: Path, *, is_done: bool) -> Iterator[str]:
    intact_count = sum(len(part.saved) for part in plan.salvaged)
    lost_names = [name for part in plan.salvaged for name in part.lost]
    names = ", ".join(lost_names[:_SHOWN_MAX]) + (", ..." if len(lost_names) > _SHOWN_MAX else "")
    verb = "are in" if is_done else "would be in"
    yield (
        f"No tool can resume from it. {count(intact_count, 'tensor')} of the damaged files {verb} "
        f"{target}."
    )
    if lost_names:
        yield f"Lost: {count(len(lost_names), 'tensor')}: {names}."
        return
    damage = reasons([problem for problem in plan.after if problem.is_fatal])
    yield f"No tensor is lost. The damage: {'; '.join(damage)}."


def build_repair_result(
    url: str,
    plan: RepairPlan,
    resume: CheckpointId | None,
    *,
    is_done: bool,
    kept_paths: Mapping[str, str],
) -> CommandResult:
    """Build the answer of ``ckpt repair``.

    Args:
        url: URL of the repository.
        plan: Repairs and losses.
        resume: Checkpoint to resume from; None if there is none, or if none was searched for.
        is_done: True if the plan was carried out.
        kept_paths: Paths at which damaged files are kept, by file name.
    """
    document = {
        "repository": url,
        "id": plan.checkpoint.folder,
        "done": is_done,
        "whole": plan.is_whole,
        "fixes": [{"type": "fix", **asdict(fix)} for fix in plan.fixes],
        "losses": [{"type": "loss", **asdict(loss)} for loss in plan.losses],
        "lost_tensors": list(plan.lost_tensors),
        "whole_tensors": list(plan.whole_tensors),
        "parts": plan.parts,
        "resume": folder(resume),
        "aside": dict(kept_paths),
    }
    verdict = "rebuilt" if is_done else "rebuild"
    rows = [*(_fix(fix, verdict) for fix in plan.fixes), *map(_loss, plan.losses)]
    table = Table(("FILE", "PLAN", "BYTES", "PROBLEM", "FROM", "TENSORS"), tuple(rows))
    ids = tuple(fix.file for fix in plan.fixes)
    lines = [*_repair_lines(plan, resume, is_done=is_done), *_backup_lines(kept_paths)]
    blocks: tuple[Table | str, ...] = (table, *lines)
    return CommandResult("ckpt.repair", "repair", document, blocks, ids)


def build_rebuild_result(plan: RebuildPlan, verdict: Resumability) -> CommandResult:
    """Build the answer of ``ckpt repair --rebuild``.

    Args:
        plan: The rebuilt folder.
        verdict: Resumability of the rebuilt folder.
    """
    rows = [(name, "known", source) for name, source in plan.known.items()]
    rows += [(name, "LOST", follows) for name, follows in plan.lost.items()]
    table = Table(("WHAT", "IS", "FROM, OR WHAT FOLLOWS"), tuple(rows))
    text = f"Step {plan.step} is in {plan.folder}; its rebuilt.json lists what is lost."
    document = {**asdict(plan), "resumable": resumable(verdict)}
    blocks = (table, text, conclusion(verdict))
    return CommandResult("ckpt.repair", "rebuild", document, blocks, (plan.folder,))


def _fix(fix: RepairStep, verdict: str) -> tuple[str, ...]:
    return (fix.file, verdict, NONE, fix.problem, fix.source, NONE)


def _loss(loss: UnrepairableFile) -> tuple[str, ...]:
    span = f"{loss.start}-{loss.stop}" if loss.stop > loss.start else NONE
    return (loss.file, "LOST", span, loss.problem, NONE, join_names(loss.tensors) or NONE)


def _repair_lines(plan: RepairPlan, resume: CheckpointId | None, *, is_done: bool) -> Iterator[str]:
    """Yield lines on repairs, losses, salvageable parts, and the checkpoint to resume from."""
    files, name = count(len(plan.fixes), "file"), plan.checkpoint
    if not plan.fixes:
        yield f"{name} is intact: nothing to repair." if plan.is_whole else "Nothing was changed."
    elif is_done:
        yield f"{files} rebuilt; each was verified against the manifest before it was written."
    else:
        yield f"{files} would be rebuilt with `--apply`. Nothing was changed."
    if plan.is_whole:
        return
    yield from _salvage(plan)
    yield f"Training can resume from {resume}." if resume else "Training cannot resume."


def _backup_lines(kept_paths: Mapping[str, str]) -> Iterator[str]:
    """Yield the places where damaged files are kept; a missing file has no copy."""
    if kept_paths:
        yield (
            "Damaged files are kept until the checkpoint is pruned: "
            f"{', '.join(kept_paths.values())}."
        )


def _salvage(plan: RepairPlan) -> Iterator[str]:
    if plan.manifest is None:
        yield (
            "Lost: the manifest and its copy, so no file can be verified. The files still exist, "
            "and each .safetensors file can be opened alone."
        )
        return
    lost_tensors, intact_tensors = plan.lost_tensors, plan.whole_tensors
    names = f": {', '.join(lost_tensors)}" if lost_tensors else ""
    yield f"Lost: {count(len(lost_tensors), 'tensor')}{names}."
    if any(loss.file.startswith("rng_state_") for loss in plan.losses):
        yield (
            "Lost random states cannot be computed from seed and step. Without them, dropout and "
            "augmentation draw other numbers from here on."
        )
    damaged_parts = [name for name, is_whole in plan.parts.items() if not is_whole]
    whole_parts = [name for name, is_whole in plan.parts.items() if is_whole]
    yield (
        f"Intact: {count(len(intact_tensors), 'tensor')}. "
        f"Intact parts: {', '.join(whole_parts) or NONE}."
    )
    yield f"Damaged parts: {', '.join(damaged_parts) or NONE}."


DAMAGE_LEFT = 1


def repair(  # noqa: PLR0913 - the options of a command
    ctx: typer.Context,
    ref: Ref = None,
    place: Place = None,
    repo: Repo = None,
    *,
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="URL",
            help="A repository with the same checkpoint. For another tool's checkpoint: another "
            "copy, another step of its run, or the log of the run.",
        ),
    ] = None,
    undelete: Annotated[
        bool,
        typer.Option(
            "--undelete",
            help="Restore a checkpoint that lost its manifest, if all its files exist.",
        ),
    ] = False,
    apply: Annotated[bool, typer.Option("--apply", help="Carry out the plan.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show the plan, as without --apply.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="PATH",
            help="Folder for the repaired checkpoint of another tool; by default repaired/NAME "
            "beside it.",
        ),
    ] = None,
    rebuild: Annotated[
        Path | None,
        typer.Option(
            "--rebuild",
            metavar="FOLDER",
            help="Write the intact parts to this folder, with a new state.",
        ),
    ] = None,
) -> int:
    """Show how a damaged checkpoint can be repaired, and what is lost; --apply repairs it.

    Files of this library are repaired from parity or from another repository. Every byte is
    verified against the manifest before it is written, and intact files are not touched. Damaged
    files are kept as aside-... until the checkpoint is pruned. Exit code 0: the checkpoint is
    intact now. 1: something is lost, and an intact checkpoint remains to resume from. 3: no intact
    checkpoint remains.

    A path or URL without a repository can also be a checkpoint of another tool (docs/layouts.md).
    The source is only read: the repair writes a new verified checkpoint and names what is lost. If
    no repair is possible, the intact tensors are saved. Nothing is unpickled.

    --rebuild salvages a checkpoint that cannot be repaired: the weights and all other intact parts
    become a folder in the layout of Hugging Face's Trainer, and its state names what is lost.
    --rebuild also rebuilds such a folder without trainer_state.json. The source is only read.

    Example: resilient ckpt repair latest runs/gpt2 --from s3://bucket/gpt2 --apply
    """
    command = " ".join(filter(None, ("resilient ckpt repair", ref, place or repo)))
    ref, place = ref_and_place(ref, place, repo)
    if out is not None:
        out = local_path(out, "--out", f"{command} --apply --out repaired")
    if rebuild is not None:
        rebuild = local_path(rebuild, "--rebuild", f"{command} --rebuild rebuilt")
        if source or undelete or dry_run or apply or out:
            raise UsageError(
                "`--rebuild` does not change its source, and excludes all other options",
                hint="resilient ckpt repair --help",
            )
        path = find_in_run(ref, place or repo)
        rebuild_plan = _rebuild(None if path else ref, path or place or repo or "", rebuild)
        # Import late: the module loads the readers of all layouts.
        from resilient.diff.verification import verify_folder

        verdict = verify_folder(rebuild_plan.folder).verdict
        show(build_rebuild_result(rebuild_plan, verdict), output_of(ctx))
        return 0 if verdict.answer == "yes" else DAMAGE_LEFT
    is_done = apply and not dry_run
    url = place or repo
    if ref is None and url and not undelete and _is_foreign(url):
        return _repair_foreign(ctx, url, source or [], out, is_done=is_done)
    store = open_repository(place, repo, reads_unsigned=True)
    try:
        committed_checkpoints(store)
    except RepositoryNotFound:
        path = find_in_run(ref, url)
        if path is None:
            raise
        return repair(
            ctx, None, path, source=source, undelete=undelete, dry_run=dry_run, apply=apply, out=out
        )
    checkpoint = _resolve_checkpoint(store, ref, undelete=undelete)
    return _repair_native(ctx, store, checkpoint, source or [], undelete=undelete, is_done=is_done)


def _repair_native(
    ctx: typer.Context,
    store: Store,
    checkpoint: CheckpointId,
    sources: list[str],
    *,
    undelete: bool,
    is_done: bool,
) -> int:
    """Show the repair plan of a native checkpoint; execute the plan if ``is_done``."""
    options = read_storage_options(os.environ)
    sources_of_files = [open_store(url, storage_options=options) for url in sources]
    with Progress("reading") as progress:
        of_bytes = sum(entry.size_bytes for entry in store.list(f"{checkpoint.folder}/"))
        reader = ProgressStore(store, progress, of_bytes)
        plan = plan_repair(reader, checkpoint, sources_of_files, undelete=undelete)
    plan = _plan_random_states(store, plan, sources_of_files, undelete=undelete)
    _require_signed(plan, [store, *sources_of_files])
    kept_paths = _carry_out(store, plan, sources_of_files) if is_done else {}
    resume = None if plan.is_whole else first_intact(store, {checkpoint: False}, VerifyLevel.FULL)
    show(
        build_repair_result(store.url, plan, resume, is_done=is_done, kept_paths=kept_paths),
        output_of(ctx),
    )
    if not plan.is_whole and resume is None:
        raise NoIntactCheckpoint(
            f"no checkpoint in `{store.url}` is left that training could resume from",
            hint=f"resilient ckpt repair {checkpoint} {shell_quote(store.url)} --from COPY",
        )
    return 0 if plan.is_whole else DAMAGE_LEFT


def _require_signed(plan: RepairPlan, stores: list[Store]) -> None:
    """Refuse to repair a checkpoint that is signed in none of the repositories.

    Raises:
        SignatureRefused: A signature is required, and the key has not signed the checkpoint.
    """
    signing = signing_policy(is_required=False)
    if not signing.is_required or plan.manifest is None:
        return
    for store in stores[1:]:
        with suppress(SignatureRefused):
            check_signature(store, plan.manifest, signing)
            return
    check_signature(stores[0], plan.manifest, signing)


def _plan_random_states(
    store: Store, plan: RepairPlan, stores: list[Store], *, undelete: bool
) -> RepairPlan:
    """Plan again with random states derived from seed and step, if they are lost and derivable."""
    if plan.manifest is None or not any(loss.file.startswith("rng_state_") for loss in plan.losses):
        return plan
    # Import late: the module needs torch.
    from resilient.train.hf_interop.rebuild import random_states_of

    options = read_storage_options(os.environ)
    states = random_states_of(store.url, plan.manifest, storage_options=options)
    if states is None:
        return plan
    stores.append(states)
    return plan_repair(store, plan.checkpoint, stores, undelete=undelete)


def _carry_out(store: Store, plan: RepairPlan, stores: list[Store]) -> dict[str, str]:
    with Waiting("repairing"):
        return apply_repair(store, plan, stores)


def _is_foreign(url: str) -> bool:
    """Return True if a place has files and is not a native repository."""
    if not is_foreign(url):
        return False
    folder = open_folder(url, read_storage_options(os.environ))
    try:
        listing = folder.list()
        return bool(listing.sizes) or is_empty(folder.url, listing)
    except KeyNotFound:
        return False


def _repair_foreign(
    ctx: typer.Context, url: str, paths: list[str], out: Path | None, *, is_done: bool
) -> int:
    """Show the repair plan of another tool's checkpoint; write the result if ``is_done``."""
    from resilient.layout_repair.plan import place_of, plan_layout_repair, write_repaired

    with Waiting("reading"):
        plan = plan_layout_repair(url, paths, read_storage_options(os.environ))
    target = out or place_of(plan)
    is_written = is_done and (plan.is_repaired or bool(plan.salvaged))
    if is_written:
        with Waiting("writing"):
            write_repaired(plan, target)
    words = ["resilient ckpt repair", shell_quote(plan.url)]
    words += [f"--from {shell_quote(path)}" for path in paths]
    words += ["--apply", *([f"--out {shell_quote(out)}"] if out else [])]
    command = " ".join(words)
    show(build_layout_repair_result(plan, target, command, is_done=is_written), output_of(ctx))
    is_fine = not plan.is_damaged and not plan.losses and not plan.refused
    return 0 if is_fine else DAMAGE_LEFT


def _rebuild(ref: str | None, place: str, out: Path) -> RebuildPlan:
    """Write the intact parts of a native checkpoint, or of a Hugging Face Trainer folder."""
    # Import late: the module needs torch.
    from resilient.train.hf_interop.rebuild import (
        is_weights_folder,
        rebuild_checkpoint,
        rebuild_folder,
    )

    with Waiting("rebuilding"):
        if is_weights_folder(place):
            return rebuild_folder(place, out)
        options = read_storage_options(os.environ)
        open_repository(place, None)
        return rebuild_checkpoint(place, out, ref or "latest", storage_options=options)


def _resolve_checkpoint(store: Store, ref: str | None, *, undelete: bool) -> CheckpointId:
    """Return the chosen checkpoint; a checkpoint without a manifest needs its full name."""
    checkpoint = parse_checkpoint(ref or "")
    if undelete and checkpoint is None:
        raise UsageError(
            "`--undelete` needs the full name of the checkpoint",
            hint=f"resilient ckpt repair checkpoint-120-g3 {shell_quote(store.url)} --undelete",
        )
    return checkpoint or resolve(store, ref or "latest")
