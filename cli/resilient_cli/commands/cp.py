"""``resilient ckpt cp``, ``import`` and ``export``: copies, imports and exports of checkpoints."""

from __future__ import annotations

import enum
import os
from pathlib import Path  # noqa: TC003 - typer reads the signatures
from typing import TYPE_CHECKING, Annotated

import typer

from resilient.checkpoint.generations import list_numbers
from resilient.checkpoint.refs import resolve
from resilient.checkpoint.replicate import plan_copy, replicate
from resilient.clock import SystemClock
from resilient.distributed.launch_env import STRICT_RESUME, read_storage_options
from resilient.environment import read_flag
from resilient.errors import IncompatibleCheckpoint
from resilient.redaction import shell_quote
from resilient_cli.output import CommandResult, Progress, Waiting, human_size, show
from resilient_cli.repositories import (
    Place,
    Ref,
    Repo,
    TakeOver,
    local_path,
    open_repository,
    output_of,
    ref_and_place,
    refuse_beside_writer,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.checkpoint.replicate import ReplicationPlan
    from resilient.format.keys import CheckpointId


def build_copy_result(
    source: str, target: str, plan: ReplicationPlan, *, dry_run: bool
) -> CommandResult:
    """Build the answer of ``ckpt cp``."""
    checkpoint = plan.manifest.checkpoint
    document = {
        "repository": source,
        "id": checkpoint.folder,
        "to": target,
        "done": not dry_run,
        "was_there": plan.is_there and not plan.missing,
        "files": len(plan.missing),
        "size_bytes": plan.size_bytes,
        "ledger": plan.ledger_problem or None,
    }
    verb = "would be copied" if dry_run else "put"
    size = human_size(plan.size_bytes)
    lines = [f"{checkpoint} of {source} -> {target}: {len(plan.missing)} files, {size} {verb}"]
    if document["was_there"]:
        lines = [f"{checkpoint} is already complete at {target}."]
    if plan.ledger_problem:
        lines.append(f"its ledger is not copied completely: {plan.ledger_problem}")
    if not dry_run:
        lines.append(f"resilient ckpt verify {checkpoint} {shell_quote(target)}")
    return CommandResult("ckpt.cp", "copy", document, tuple(lines), (checkpoint.folder,))


def build_import_result(
    url: str,
    source: str,
    checkpoint: CheckpointId,
    losses: Sequence[str] = (),
    oddities: Sequence[str] = (),
) -> CommandResult:
    """Build the answer of ``ckpt import``.

    Args:
        url: URL of the repository.
        source: The imported folder.
        checkpoint: The new checkpoint in the repository.
        losses: Descriptions of the state that was lost.
        oddities: Descriptions of contradictions and of ignored weights.
    """
    document = {"repository": url, "from": source, "id": checkpoint.folder}
    text = f"{source} is now {checkpoint} of {url}."
    if losses:
        document["lost"] = "; ".join(losses)
        text = f"{text} Lost: {document['lost']}."
    if oddities:
        document["odd"] = "; ".join(oddities)
        text = f"{text} Also found: {document['odd']}."
    return CommandResult("ckpt.import", "import", document, (text,), (checkpoint.folder,))


def build_export_result(url: str, target: str, name: str) -> CommandResult:
    """Build the answer of ``ckpt export``."""
    document = {"repository": url, "id": name, "folder": target}
    text = f"{name} of {url} is in {target}."
    return CommandResult("ckpt.export", "export", document, (text,), (target,))


class ExportKind(enum.StrEnum):
    """Formats of ``ckpt export``."""

    HF = "hf"
    SAFETENSORS = "safetensors"
    TORCH = "torch"
    DCP = "dcp"


def cp(  # noqa: PLR0913 - the options of a command
    ctx: typer.Context,
    ref: Annotated[str, typer.Argument(metavar="REF", help="Checkpoint to copy, or its path.")],
    target: Annotated[str, typer.Argument(metavar="URL", help="URL of the other repository.")],
    repo: Repo = None,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be copied.")
    ] = False,
    single_writer: Annotated[
        bool, typer.Option("--single-writer", help="Promise: no other process writes to URL.")
    ] = False,
    take_over: TakeOver = False,
) -> None:
    """Copy a checkpoint to another repository, and verify every byte on the way.

    The copy keeps its name, signature and ledger, and becomes visible when it is complete. A run
    with `--repo URL` then resumes from the copy. Files that already exist are not copied again.
    Bytes stored in older checkpoints are copied too. RESILIENT_STORAGE_OPTIONS apply to both
    repositories.

    The copy of a newer attempt would end a live writer of URL at its next save. The command is
    therefore refused with 80 beside such a writer; --take-over overrides the refusal.

    Example: resilient ckpt cp best:eval_loss s3://lab/kept --repo runs/gpt2
    """
    checkpoint_ref, place = ref_and_place(ref, None, repo)
    source = open_repository(place, repo)
    destination = open_repository(target, None, reads_unsigned=True)
    plan = plan_copy(source, destination, resolve(source, checkpoint_ref or "latest"))
    numbers = list_numbers(destination)
    is_newer = bool(numbers) and plan.manifest.checkpoint.generation > numbers[-1]
    if is_newer and not dry_run and not take_over:
        name = plan.manifest.checkpoint
        words = (
            f"resilient ckpt cp {shell_quote(name)} {shell_quote(destination.url)} "
            f"--repo {shell_quote(source.url)} --take-over"
        )
        refuse_beside_writer(destination, words)
    if not dry_run:
        with Progress("copying") as progress:
            replicate(
                source, destination, plan, SystemClock(), progress, single_writer=single_writer
            )
    show(build_copy_result(source.url, destination.url, plan, dry_run=dry_run), output_of(ctx))


def import_(
    ctx: typer.Context,
    folder: Annotated[
        str,
        typer.Argument(metavar="FOLDER", help="Folder of the checkpoint, such as checkpoint-500."),
    ],
    place: Place = None,
    repo: Repo = None,
    *,
    strict_resume: Annotated[
        bool,
        typer.Option(
            "--strict-resume",
            help="Reject a checkpoint that lost a part of its state, and write nothing; by default "
            "the answer names the loss. RESILIENT_STRICT_RESUME has the same effect.",
        ),
    ] = False,
    take_over: TakeOver = False,
) -> None:
    """Write a checkpoint of the Hugging Face Trainer to a new repository.

    The command builds the model from the folder's config.json; no parameter may be frozen.
    `resilient train --resume FOLDER` does the same with the model of a script. Pickles are read as
    plain data. Beside a live writer the command is refused with 80; --take-over overrides the
    refusal.

    Example: resilient ckpt import theirs/checkpoint-500 runs/gpt2
    """
    # Import late: the module needs torch.
    from resilient.train.hf_interop.importer import import_folder

    store = open_repository(place, repo)
    options = read_storage_options(os.environ)
    if not take_over:
        words = f"resilient ckpt import {shell_quote(folder)} {shell_quote(store.url)} --take-over"
        refuse_beside_writer(store, words)
    with Waiting("importing"):
        result = import_folder(
            folder,
            place or repo or "",
            strict=strict_resume or read_flag(os.environ, STRICT_RESUME),
            storage_options=options,
        )
    answer = build_import_result(store.url, folder, result.checkpoint, result.lost, result.odd)
    show(answer, output_of(ctx))


def export(
    ctx: typer.Context,
    ref: Ref = None,
    place: Place = None,
    repo: Repo = None,
    *,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="New folder to write.")],
    kind: Annotated[
        ExportKind,
        typer.Option(
            "--format",
            help="hf: everything that Transformers needs to resume. safetensors, torch, dcp: "
            "weights and moments, by name.",
        ),
    ] = ExportKind.HF,
) -> None:
    """Write a verified checkpoint for other tools; the folder appears when it is complete.

    hf is the layout of Hugging Face's Trainer, for its resume_from_checkpoint: model, optimizer,
    schedule, random state and trainer_state.json, of a checkpoint of our trainer. The other formats
    accept a checkpoint of any tool, as `ckpt diff` does, and write unsharded tensors:
    model.safetensors and optimizer.safetensors, one checkpoint.pt for torch.load, or a folder of
    torch.distributed.checkpoint.

    Example: resilient ckpt export latest runs/gpt2 --format hf --out theirs/checkpoint-500

    Example: resilient ckpt export out/global_step500 --format safetensors --out weights
    """
    words = " ".join(shell_quote(word) for word in (ref or "latest", place or repo) if word)
    command = f"resilient ckpt export {words}"
    out = local_path(out, "--out", f"{command} --format {kind.value} --out exported")
    if kind is not ExportKind.HF:
        _export_plainly(ctx, (ref or "latest", place, repo), out, kind)
        return
    from resilient.train.hf_interop.exporter import export_checkpoint

    ref, place = ref_and_place(ref, place, repo)
    store = open_repository(place, repo)
    options = read_storage_options(os.environ)
    url = place or repo or ""
    with Waiting("exporting"):
        checkpoint = export_checkpoint(url, out, ref or "latest", storage_options=options)
    show(build_export_result(store.url, str(out), checkpoint.folder), output_of(ctx))


def _export_plainly(
    ctx: typer.Context, location: tuple[str, str | None, str | None], out: Path, kind: ExportKind
) -> None:
    from resilient.layouts.model import Unreadable
    from resilient.train.hf_interop.exporter import ExportFormat, export_tensors
    from resilient_cli.foreign import open_view, require_whole

    side = open_view(*location)
    require_whole(side)
    try:
        with Progress("writing") as progress:
            export_tensors(side, out, ExportFormat(kind.value), progress)
    except Unreadable as error:
        raise IncompatibleCheckpoint(
            f"cannot export {side.url}: {error}",
            hint=f"resilient ckpt inspect {shell_quote(side.url)}",
        ) from error
    place = side.url.removesuffix(f"/{side.name}")
    show(build_export_result(place, str(out), side.name), output_of(ctx))
