"""``resilient ckpt repair``: a damaged checkpoint made whole, or what is lost of it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path  # noqa: TC003 - Typer reads the signature
from typing import TYPE_CHECKING, Annotated

import typer

from resilient.errors import (
    KeyNotFound,
    NoIntactCheckpoint,
    RepositoryNotFound,
    SignatureRefused,
    UsageError,
)
from resilient.format.names import parse_checkpoint
from resilient.showing import quoted
from resilient.storage.folder import open_folder
from resilient.storage.open import open_store
from resilient.vault.health.repair import carry_out_repair, plan_repair
from resilient.vault.registry.references import resolve
from resilient.vault.registry.signing import check_signature
from resilient.world.launch import read_storage_options
from resilient_cli.foreign import is_foreign
from resilient_cli.places import (
    Place,
    Ref,
    Repo,
    committed_of,
    local_path,
    open_repository,
    output_of,
    ref_and_place,
    signing_of,
)
from resilient_cli.progress import Progress, Waiting
from resilient_cli.render import show
from resilient_cli.runs import in_run
from resilient_cli.survey import Level, first_intact
from resilient_cli.told import ToldStore
from resilient_cli.views.mending import mending
from resilient_cli.views.repair import rebuilding, repairing

if TYPE_CHECKING:
    from resilient.format.names import CheckpointId
    from resilient.storage.store import Store
    from resilient.train.interop.rebuilding import Rebuilt
    from resilient.vault.health.repair import RepairPlan

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
            help="A repository with the same checkpoint; of another tool's checkpoint another "
            "copy, another step of its run, or what the run logged.",
        ),
    ] = None,
    undelete: Annotated[
        bool,
        typer.Option("--undelete", help="Bring back what lost its manifest, if it is all there."),
    ] = False,
    apply: Annotated[bool, typer.Option("--apply", help="Do what the plan says.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show the plan, as without --apply.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="PATH",
            help="Where another tool's checkpoint is written; by default repaired/NAME beside it.",
        ),
    ] = None,
    rebuild: Annotated[
        Path | None,
        typer.Option(
            "--rebuild", metavar="FOLDER", help="Write what is whole there, with a new state."
        ),
    ] = None,
) -> int:
    """Show how a damaged checkpoint can be made whole, and what cannot be; --apply does it.

    Files of ours are made whole from parity, or from another repository: every byte is proved
    against the manifest before it is put, and what is whole is not touched. What was damaged stays
    beside it as aside-..., until the checkpoint is pruned. Exit code 0: it is whole then. 1:
    something is lost, and an intact checkpoint remains to resume from. 3: none does.

    A lone path or URL may also be a checkpoint of another tool (docs/layouts.md). It is only read:
    what is mended is a new checkpoint, proved before it is written, and what is lost is named. Of
    what nothing mends, the tensors that are whole are saved. Nothing is unpickled.

    What cannot be made whole is salvaged by --rebuild: weights, and whatever else is whole, become
    a folder as Hugging Face's Trainer keeps it, with a state that says what is lost. Such a folder
    that lost its own trainer_state.json is rebuilt the same way. The source is only read.

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
                "`--rebuild` changes nothing in its source, and goes with no other option",
                hint="resilient ckpt repair --help",
            )
        path = in_run(ref, place or repo)
        made = _rebuild(None if path else ref, path or place or repo or "", rebuild)
        # Not before it is needed: it loads the readers of all layouts.
        from resilient.comparison.verification import verify_folder

        verdict = verify_folder(made.folder).verdict
        show(rebuilding(made, verdict), output_of(ctx))
        return 0 if verdict.answer == "yes" else DAMAGE_LEFT
    is_done = apply and not dry_run
    url = place or repo
    if ref is None and url and not undelete and _is_of_others(url):
        return _mend(ctx, url, source or [], out, is_done=is_done)
    store = open_repository(place, repo, reads_unsigned=True)
    try:
        committed_of(store)
    except RepositoryNotFound:
        path = in_run(ref, url)
        if path is None:
            raise
        return repair(
            ctx, None, path, source=source, undelete=undelete, dry_run=dry_run, apply=apply, out=out
        )
    checkpoint = _named(store, ref, undelete=undelete)
    return _mend_ours(ctx, store, checkpoint, source or [], undelete=undelete, is_done=is_done)


def _mend_ours(
    ctx: typer.Context,
    store: Store,
    checkpoint: CheckpointId,
    sources: list[str],
    *,
    undelete: bool,
    is_done: bool,
) -> int:
    """Show how a checkpoint of ours can be made whole, and do it when that is asked for."""
    options = read_storage_options(os.environ)
    others = [open_store(url, storage_options=options) for url in sources]
    with Progress("reading") as told:
        of_bytes = sum(one.size_bytes for one in store.list(f"{checkpoint.folder}/"))
        reader = ToldStore(store, told, of_bytes)
        plan = plan_repair(reader, checkpoint, others, undelete=undelete)
    plan = _with_random_states(store, plan, others, undelete=undelete)
    _require_signed(plan, [store, *others])
    aside = _carry_out(store, plan, others) if is_done else {}
    resume = None if plan.is_whole else first_intact(store, {checkpoint: False}, Level.FULL)
    show(repairing(store.url, plan, resume, done=is_done, aside=aside), output_of(ctx))
    if not plan.is_whole and resume is None:
        raise NoIntactCheckpoint(
            f"no checkpoint in `{store.url}` is left that training could resume from",
            hint=f"resilient ckpt repair {checkpoint} {quoted(store.url)} --from COPY",
        )
    return 0 if plan.is_whole else DAMAGE_LEFT


def _require_signed(plan: RepairPlan, stores: list[Store]) -> None:
    """Refuse to repair a checkpoint that none of the repositories has a signature of.

    Raises:
        SignatureRefused: a signature is required, and the key has not signed the checkpoint.
    """
    signing = signing_of(is_required=False)
    if not signing.is_required or plan.manifest is None:
        return
    for store in stores[1:]:
        with suppress(SignatureRefused):
            check_signature(store, plan.manifest, signing)
            return
    check_signature(stores[0], plan.manifest, signing)


def _with_random_states(
    store: Store, plan: RepairPlan, others: list[Store], *, undelete: bool
) -> RepairPlan:
    """Plan anew with random states that follow from seed and step, if some are lost and do."""
    if plan.manifest is None or not any(one.file.startswith("rng_state_") for one in plan.losses):
        return plan
    # Not before it is needed: it takes torch.
    from resilient.train.interop.reseeding import random_states_of

    options = read_storage_options(os.environ)
    made = random_states_of(store.url, plan.manifest, storage_options=options)
    if made is None:
        return plan
    others.append(made)
    return plan_repair(store, plan.checkpoint, others, undelete=undelete)


def _carry_out(store: Store, plan: RepairPlan, others: list[Store]) -> dict[str, str]:
    with Waiting("repairing"):
        return carry_out_repair(store, plan, others)


def _is_of_others(url: str) -> bool:
    """Say whether files are at a place, and no repository of ours."""
    if not is_foreign(url):
        return False
    folder = open_folder(url, read_storage_options(os.environ))
    try:
        return bool(folder.list().sizes)
    except KeyNotFound:
        return False


def _mend(
    ctx: typer.Context, url: str, others: list[str], out: Path | None, *, is_done: bool
) -> int:
    """Show how a checkpoint of another tool can be mended, and write it when that is asked for."""
    from resilient.mending.applying import place_of, write_mended
    from resilient.mending.planning import plan_mending

    with Waiting("reading"):
        plan = plan_mending(url, others, read_storage_options(os.environ))
    target = out or place_of(plan)
    is_written = is_done and (plan.is_mended or bool(plan.salvaged))
    if is_written:
        with Waiting("writing"):
            write_mended(plan, target)
    words = ["resilient ckpt repair", quoted(plan.url)]
    words += [f"--from {quoted(one)}" for one in others]
    words += ["--apply", *([f"--out {quoted(out)}"] if out else [])]
    command = " ".join(words)
    show(mending(plan, target, command, done=is_written), output_of(ctx))
    is_fine = not plan.is_damaged and not plan.losses and not plan.refused
    return 0 if is_fine else DAMAGE_LEFT


def _rebuild(ref: str | None, place: str, out: Path) -> Rebuilt:
    """Write what is whole of a checkpoint of ours, or of a folder of Hugging Face's Trainer."""
    # Not before it is asked for: it takes torch.
    from resilient.train.interop.rebuilding import is_weights_folder, rebuild_folder
    from resilient.train.interop.salvaging import rebuild_checkpoint

    with Waiting("rebuilding"):
        if is_weights_folder(place):
            return rebuild_folder(place, out)
        options = read_storage_options(os.environ)
        open_repository(place, None)
        return rebuild_checkpoint(place, out, ref or "latest", storage_options=options)


def _named(store: Store, ref: str | None, *, undelete: bool) -> CheckpointId:
    """Return the checkpoint that is meant; one without a manifest has to be named in full."""
    named = parse_checkpoint(ref or "")
    if undelete and named is None:
        raise UsageError(
            "`--undelete` needs the full name of the checkpoint",
            hint=f"resilient ckpt repair checkpoint-120-g3 {quoted(store.url)} --undelete",
        )
    return named or resolve(store, ref or "latest")
