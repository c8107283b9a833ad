"""Import of a Transformers checkpoint as the first checkpoint of a repository.

One rank writes the complete checkpoint before training begins. Every rank then resumes from this
checkpoint as from any other, in any parallel layout. After the import, the source folder is no
longer needed. If the repository is not empty, its run must have begun from exactly the same
Transformers checkpoint. Otherwise the import is refused.

If the import runs without a training script, the model is built from its configuration file.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from resilient.checkpoint.catalog import read_manifest
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.diff.verification import refuse_losses
from resilient.distributed.coordination import agree, capture_failure
from resilient.distributed.launch_env import REQUIRE_SIGNATURE
from resilient.engine_factory import open_engine
from resilient.environment import read_flag
from resilient.errors import (
    ConfigError,
    IncompatibleCheckpoint,
    IntegrityError,
    NoIntactCheckpoint,
    NothingToResume,
    ResilientError,
    SignatureRefused,
)
from resilient.events import CheckpointSkipped, Event, Level
from resilient.format.keys import CheckpointId, parse_checkpoint
from resilient.layouts.best_checkpoint import best_step
from resilient.redaction import shell_quote
from resilient.start_guard import STEP_FOLDER, is_path
from resilient.state_dict.flatten import PLAIN
from resilient.state_dict.snapshot import Part
from resilient.state_dict.statefuls import bare
from resilient.storage.open import local_root
from resilient.strategies.module_wrapper import find_redirect
from resilient.strategies.pipeline import pipeline_of
from resilient.train.arguments.resume_rules import changes_at_import
from resilient.train.events import ArgumentsChanged
from resilient.train.hf_interop.checkpoint import (
    CONFIG,
    TransformersCheckpoint,
    is_transformers_folder,
)
from resilient.train.hf_interop.conversion import (
    FreshState,
    Naming,
    RawState,
    absolute_path,
    documents_of,
    naming_of,
    parts_of,
    trainer_state,
)
from resilient.train.hf_interop.import_check import (
    SkippedFolder,
    lost_weights,
    open_source,
    plan_takeover,
    require_loadable,
    require_place,
    require_same_kinds,
    require_same_objects,
    require_same_optimizer,
    require_schedule,
    require_step,
    step_of,
    with_lost_weights,
)
from resilient.train.optimizers.builtin import parameter_groups
from resilient.train.run import BEGAN_DIGEST, BEGAN_FROM
from resilient.train.saver import policy_for
from resilient.train.schedules.factory import ScheduleState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from resilient.checkpoint_engine import CheckpointEngine
    from resilient.train.hf_interop.import_check import ImportSource, TakeoverPlan
    from resilient.train.trainer_hooks import TrainerHooks

IMPORTED_AS, BEST = "imported_as", "best"
IMPORTED_FROM, IMPORTED_DIGEST = "imported_from", "imported_digest"
_BEST = "the best checkpoint"
_NAMED_MAX = 3
_GONE = "gone"
"""Mark of the digest of a folder that was deleted after its import."""


@dataclass(frozen=True, slots=True)
class HFCheckpointImported(Event):
    """A checkpoint of another trainer was written to the repository in our format."""

    folder: str
    checkpoint: str
    step: int
    lost: tuple[str, ...] = ()

    def message(self) -> str:
        """Format the source, the new name and the losses."""
        losses_text = f", without {', '.join(self.lost)}" if self.lost else ""
        return f"imported step {self.step} of `{self.folder}` as {self.checkpoint}{losses_text}"


@dataclass(frozen=True, slots=True)
class SourceGone(Event):
    """The folder that ``--resume`` names was deleted after the run had imported it."""

    template: ClassVar[str] = (
        "`{folder}` is gone: this run began from it, and continues from its own newest checkpoint"
    )
    folder: str


@dataclass(frozen=True, slots=True)
class NewerCheckpointsIgnored(Event):
    """The run continues from its own checkpoint, but another trainer saved later steps there.

    Attributes:
        checkpoint: Newest checkpoint of the run.
        newer: Folders of the other trainer with later steps, newest first.
    """

    level: ClassVar[Level] = Level.WARNING
    checkpoint: str
    newer: tuple[str, ...]

    def message(self) -> str:
        """Format the folders and the command that continues from the newest of them."""
        names = ", ".join(Path(path).name for path in self.newer[:_NAMED_MAX])
        more = len(self.newer) - _NAMED_MAX
        names += f" and {more} more" if more > 0 else ""
        return (
            f"the run continues from its own newest checkpoint, {self.checkpoint}, and ignores "
            f"later ones that Transformers saved beside it: {names}; to continue from "
            f"{Path(self.newer[0]).name} instead, with a new repository NEW: "
            f"resilient train --repo NEW --resume {shell_quote(self.newer[0])} SCRIPT"
        )


@dataclass(frozen=True, slots=True)
class ImportLossReported(Event):
    """A checkpoint of another trainer was imported although a part of it was already lost."""

    level: ClassVar[Level] = Level.WARNING
    folder: str
    lost: tuple[str, ...]

    def message(self) -> str:
        """Format the losses and the command that gives details."""
        return (
            f"training continues from `{self.folder}` with loss of {'; '.join(self.lost)}; "
            "strict_resume refuses that; "
            f"resilient ckpt verify {shell_quote(self.folder)} says more"
        )


@dataclass(frozen=True, slots=True)
class ImportOddityReported(Event):
    """A checkpoint of another trainer was imported, and its files contradict each other."""

    level: ClassVar[Level] = Level.WARNING
    folder: str
    odd: tuple[str, ...]

    def message(self) -> str:
        """Format the contradictions and the command that gives details."""
        return (
            f"training continues from `{self.folder}` although {'; '.join(self.odd)}; "
            f"resilient ckpt verify {shell_quote(self.folder)} says more"
        )


def foreign_folder(reference: str) -> str:
    """Return the folder that a reference names; ``""`` for a native checkpoint."""
    return reference if is_transformers_folder(reference) else ""


def import_hf_run(hooks: TrainerHooks, reference: str, more: Mapping[str, Part], topic: str) -> str:
    """Import the requested Transformers checkpoint into the repository. Collective.

    Args:
        hooks: Trainer; its model and optimizer give the names of state saved by position.
        reference: Reference from which this attempt begins, as determined by the resume policy.
        more: Parts that Transformers does not have; they begin with their initial state.
        topic: Name of this training.

    Returns:
        Digests of the requested folder for :func:`require_origin`; empty text if no Transformers
        checkpoint was requested.

    Raises:
        IntegrityError: The folder is damaged.
        IncompatibleCheckpoint: The folder belongs to another model, or has only a model.
        NoIntactCheckpoint: No folder was named, and all folders of the run are damaged or
            incomplete.
    """
    session = hooks.session
    if reference == "never":
        return ""
    take = _import_newest if reference == "auto" else _import_named
    is_mine = session.world.is_coordinator
    work = capture_failure(lambda: take(hooks, reference, more, topic)) if is_mine else ""
    comms, seconds = session.comms(f"taking/{topic}"), session.args.save_within_seconds
    try:
        digests: str = agree(comms, "taken", work, lambda answers: answers[0], seconds)
    finally:
        comms.close()
    return digests


def require_origin(origin: Mapping[str, Any] | None, digest: str, repository: str) -> None:
    """Raise unless the resumed run began from the requested checkpoint.

    Args:
        origin: Origin recorded in the resumed checkpoint.
        digest: Result of :func:`import_hf_run`.
        repository: URL of the repository.

    Raises:
        ConfigError: The repository contains a run that began from another checkpoint.
    """
    if digest and not _is_origin(origin or {}, *digest.split(":")):
        raise ConfigError(
            f"cannot import a checkpoint of Transformers: the repository `{repository}` already "
            "holds a run that did not start from it",
            hint="name another `output_dir`, or continue the run: omit `resume_from_checkpoint`",
        )


def _is_origin(origin: Mapping[str, Any], state_digest: str, digest: str) -> bool:
    """Return whether a run began from a folder. An older origin has only the state's digest."""
    if state_digest == _GONE:
        return bool(origin.get("digest") == digest)
    if "state_digest" not in origin:
        return origin.get("digest") == state_digest
    return origin["state_digest"] == state_digest and digest in ("", origin["digest"])


def is_source_gone(digest: str) -> bool:
    """Return whether a result of :func:`import_hf_run` is the digest of a deleted folder."""
    return digest.startswith(f"{_GONE}:")


@dataclass(frozen=True, slots=True)
class Import:
    """All data of an import in memory, after the checks and before the commit.

    Attributes:
        source: The folder.
        parts: Parts of the checkpoint; the name of the checkpoint is not known yet.
        best: Step and parts of the best model's checkpoint; None without one.
        lost: Losses in words.
        odd: Findings of ``ckpt verify`` without a known loss.
    """

    source: TransformersCheckpoint
    parts: dict[str, Part]
    best: tuple[int, dict[str, Part]] | None
    lost: tuple[str, ...]
    odd: tuple[str, ...] = ()

    def commit(self, engine: CheckpointEngine) -> CheckpointId:
        """Claim a generation and write the best model's checkpoint, then the imported checkpoint.

        Crash: the checkpoint is committed completely, or not at all. The best model alone may
        remain; the next import ignores it.

        Raises:
            IntegrityError: The folder changed since it was read; nothing was claimed.
            SaveFailed: The checkpoint could not be made durable.
        """
        source, parts = self.source, dict(self.parts)
        source.source.require_unchanged()
        engine.resume({}, ref="never", cause="import")
        checkpoint = CheckpointId(engine.generation, source.step)
        keep: tuple[CheckpointId, ...] = ()
        if self.best is not None:
            step, best_parts = self.best
            data = {IMPORTED_FROM: os.fspath(source.folder), IMPORTED_AS: BEST}
            engine.save(
                step, best_parts, CheckpointInfo(config={"save_only_model": True}, data=data)
            )
            engine.wait()
            keep = (CheckpointId(engine.generation, step),)
            parts["best"] = Part(RawState({"checkpoint": str(keep[0])}))
        elif best_step(os.fspath(source.folder), source.state) == source.step:
            parts["best"] = Part(RawState({"checkpoint": str(checkpoint)}))
        engine.save(source.step, parts, self._about(), keep=keep)
        engine.wait()
        return checkpoint

    def _about(self) -> CheckpointInfo:
        state = self.source.state
        metrics = {
            name: value
            for entry in state["log_history"]
            if entry.get("step") == self.source.step
            for name, value in entry.items()
            if name.startswith("eval_") and isinstance(value, int | float)
        }
        data = {
            "epoch": trainer_state(self.source)["epoch"],
            IMPORTED_FROM: absolute_path(self.source.folder),
            IMPORTED_DIGEST: self.source.digest,
        }
        return CheckpointInfo(data=data, metrics=metrics)


def prepare_import(
    folder: str | os.PathLike[str],
    naming: Naming,
    model: nn.Module | None,
    *,
    strict: bool = False,
    fresh: FreshState | None = None,
) -> Import:
    """Read a Transformers checkpoint and check that it can be loaded; nothing is committed.

    Args:
        folder: Folder saved by Transformers.
        naming: Names of the model that will continue.
        model: The model that will load the checkpoint; None if it cannot be compared.
        strict: Whether any loss is refused.
        fresh: Initial optimizer and schedule, for a folder that lost one of them.

    Raises:
        NothingToResume: The folder has no checkpoint.
        IntegrityError: The verdict is "not resumable".
        IncompatibleCheckpoint: The folder is of another model, or ``strict`` refuses its losses.
        SignatureRefused: ``RESILIENT_REQUIRE_SIGNATURE`` is set: folders of other tools are never
            signed.
    """
    _refuse_unsigned(os.fspath(folder))
    source = open_source(os.fspath(folder), strict=strict, buffers=_buffers(model))
    (parts, lost), odd = _read_parts(source.found, naming, fresh), source.odd
    source = replace(source, lost=with_lost_weights(source.lost, lost))
    if strict:
        refuse_losses(os.fspath(folder), source.lost)
    if model is not None:
        parts, ignored = require_loadable(parts, model, os.fspath(folder))
        odd += ignored
    best, losses = best_of(source, naming, model)
    if strict and losses != source.lost:
        raise IncompatibleCheckpoint(
            f"cannot import `{folder}`: the best checkpoint of its run is lost, and strict_resume "
            "refuses a loss. Nothing was committed",
            hint=f"resilient ckpt inspect {shell_quote(os.fspath(folder))}",
        )
    return Import(source.found, parts, best, losses, odd)


def _read_parts(
    source: TransformersCheckpoint, naming: Naming, fresh: FreshState | None
) -> tuple[dict[str, Part], str]:
    """Return the parts of a folder, and the loss of adapter weights that it lacks.

    Raises:
        IntegrityError: A file has values that no Trainer saves.
        IncompatibleCheckpoint: The folder is of another model.
    """
    try:
        tensors = source.weights()
        lost = lost_weights(tensors, naming, os.fspath(source.folder))
        return parts_of(source, naming, "", fresh, tensors), lost
    except ResilientError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        folder = os.fspath(source.folder)
        raise IntegrityError(
            f"cannot import `{folder}`: a value in it has a form that no Trainer saves "
            f"({type(error).__name__}: {error}). Nothing was committed",
            key=folder,
            hint=f"resilient ckpt verify {shell_quote(folder)}",
        ) from error


def best_of(
    source: ImportSource, naming: Naming, model: nn.Module | None
) -> tuple[tuple[int, dict[str, Part]] | None, tuple[str, ...]]:
    """Return the best model of a run, if its folder is beside this folder, and all losses.

    Only the sibling folder ``checkpoint-<step>`` is opened, whatever path is recorded.
    """
    checkpoint, source_losses = source.found, source.lost
    step = best_step(os.fspath(checkpoint.folder), checkpoint.state)
    if step is None or step == checkpoint.step:
        return None, source_losses
    losses = source_losses if _BEST in source_losses else (*source_losses, _BEST)
    folder = checkpoint.folder.absolute().parent / f"checkpoint-{step}"
    if step > checkpoint.step or not is_transformers_folder(folder):
        return None, losses
    try:
        best_checkpoint = open_source(folder, buffers=_buffers(model)).found
        tensors = best_checkpoint.weights()
        if lost_weights(tensors, naming, os.fspath(folder)):
            return None, losses
        parts = {
            "model": Part(RawState(naming.complete(tensors))),
            **documents_of(best_checkpoint),
        }
        if model is not None:
            parts, _ = require_loadable(parts, model, os.fspath(folder))
        best_checkpoint.source.require_unchanged()
    except (IntegrityError, IncompatibleCheckpoint, NothingToResume):
        return None, losses
    return (step, parts), source_losses


def _buffers(model: nn.Module | None) -> set[str]:
    return set() if model is None else {name for name, _ in model.named_buffers()}


def holds_run(engine: CheckpointEngine) -> bool:
    """Return whether a repository contains a run, not only the rest of a killed import."""
    checkpoints = engine.committed()
    if not checkpoints:
        return engine.holds_run()
    return any(
        read_manifest(engine.store, checkpoint).data.get(IMPORTED_AS) != BEST
        for checkpoint in checkpoints
    )


def _refuse_unsigned(folder: str) -> None:
    """Refuse a folder of another tool if a signature is required.

    Raises:
        SignatureRefused: A signature is required.
    """
    if read_flag(os.environ, REQUIRE_SIGNATURE):
        raise SignatureRefused(
            f"`{folder}` belongs to another tool and is not signed, but a signature is required; "
            "nothing was imported",
            key=folder,
            hint=f"if you trust it: {REQUIRE_SIGNATURE}=0 "
            f"resilient ckpt import {shell_quote(folder)} REPO",
        )


def _import_newest(hooks: TrainerHooks, _: str, more: Mapping[str, Part], topic: str) -> str:
    """Write the newest intact Transformers checkpoint of the output folder to the repository.

    If no checkpoint is intact, the newest checkpoint that is resumable with a loss is imported. A
    repository that contains a run is left unchanged.

    Raises:
        NoIntactCheckpoint: There are Transformers checkpoints, but none of them is resumable.
        IncompatibleCheckpoint: Each checkpoint has a loss, and ``strict_resume`` refuses losses.
    """
    session = hooks.session
    if not _holds_step_folder(session.args.output_dir):
        return ""
    plan = plan_takeover(session.args.output_dir)
    if not plan.candidates and not plan.skipped:
        return ""
    engine = session.checkpointer_alone(topic)
    try:
        if holds_run(engine):
            if session.rank_group.launch.cause == "start":
                _warn_of_newer(hooks, engine.committed(), plan)
            return ""
        folder, prepared, skipped = _choose(hooks, plan, more)
        for skip in skipped:
            if step_of(skip.path) > step_of(folder):
                session.emit(CheckpointSkipped(skip.path, skip.reason))
        return _commit(hooks, engine, folder, prepared)
    finally:
        engine.close()


def _warn_of_newer(
    hooks: TrainerHooks, checkpoints: Sequence[CheckpointId], plan: TakeoverPlan
) -> None:
    """Report folders of Transformers with later steps than the newest checkpoint of the run."""
    lossy = [skip.path for skip in plan.skipped if skip.is_lossy]
    folders = sorted((*plan.candidates, *lossy), key=step_of, reverse=True)
    newest = checkpoints[0] if checkpoints else None
    newer = tuple(folder for folder in folders if newest and step_of(folder) > newest.step)
    if newest and newer:
        hooks.session.emit(NewerCheckpointsIgnored(newest.folder, newer))


def _choose(
    hooks: TrainerHooks, plan: TakeoverPlan, more: Mapping[str, Part]
) -> tuple[str, Import, list[SkippedFolder]]:
    """Return the folder to import, its data, and the folders that were rejected.

    Each candidate is read in full, because headers do not show flipped bits and infinite numbers.
    """
    skipped = list(plan.skipped)
    for folder in plan.candidates:
        try:
            prepared = _prepare(hooks, folder, more, strict=False)
        except SignatureRefused:
            raise
        except IntegrityError as error:
            skipped.append(SkippedFolder(folder, error.message))
            continue
        if not prepared.lost:
            return folder, prepared, skipped
        reason = f"resumable with loss of {'; '.join(prepared.lost)}"
        skipped.append(SkippedFolder(folder, reason, is_lossy=True))
    skipped.sort(key=lambda skip: step_of(skip.path), reverse=True)
    for skip in [skip for skip in skipped if skip.is_lossy]:
        try:
            prepared = _prepare(hooks, skip.path, more, strict=_is_strict(hooks))
        except IntegrityError as error:
            skipped[skipped.index(skip)] = SkippedFolder(skip.path, error.message)
        else:
            return skip.path, prepared, skipped
    raise _nothing_resumable(hooks.session.args.output_dir, skipped)


def _holds_step_folder(output: str) -> bool:
    """Return whether an output folder may have Transformers checkpoints.

    Most folders have none. This quick test avoids the search for layouts, which reads all names
    below the folder.
    """
    root = local_root(output)
    if root is None:
        return False
    try:
        return any(STEP_FOLDER.fullmatch(path.name) for path in root.iterdir())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False


def _nothing_resumable(output: str, skipped: Sequence[SkippedFolder]) -> NoIntactCheckpoint:
    reasons = "; ".join(f"{skip.path}: {skip.reason}" for skip in skipped)
    return NoIntactCheckpoint(
        f"no checkpoint of Transformers in `{output}` is intact, and training does not start over "
        f"silently: {reasons}",
        hint=f"resilient ckpt inspect {shell_quote(skipped[0].path)}; to start at step 0: "
        "resilient train --resume never SCRIPT, or trainer.train(resume_from_checkpoint=False)",
    )


def _import_named(hooks: TrainerHooks, reference: str, more: Mapping[str, Part], topic: str) -> str:
    """Write the folder that the reference names to the repository, if it names a folder.

    The folder of a finished import may be deleted, so a run that began from it continues.
    """
    folder = foreign_folder(reference)
    if folder:
        return _import_unless_used(hooks, folder, more, topic)
    is_native = parse_checkpoint(Path(reference).name) is not None
    if is_native or not is_path(reference) or os.path.lexists(reference):
        return ""
    engine = hooks.session.checkpointer_alone(topic)
    try:
        digest = _recorded_digest(engine, reference)
    finally:
        engine.close()
    return f"{_GONE}:{digest}" if digest else ""


def _recorded_digest(engine: CheckpointEngine, folder: str) -> str:
    """Return the digest of a deleted folder if the repository's run began from it, else ``""``."""
    for checkpoint in engine.committed():
        data = read_manifest(engine.store, checkpoint).data
        if data.get(IMPORTED_AS) == BEST:
            continue
        for path, digest in ((BEGAN_FROM, BEGAN_DIGEST), (IMPORTED_FROM, IMPORTED_DIGEST)):
            if data.get(path):
                is_same = not _spellings(data[path]).isdisjoint(_spellings(folder))
                return str(data.get(digest, "")) if is_same else ""
    return ""


def _spellings(path: str) -> set[str]:
    return {absolute_path(path), os.path.realpath(path)}


def _import_unless_used(
    hooks: TrainerHooks, folder: str, more: Mapping[str, Part], topic: str
) -> str:
    """Write a folder to the repository, unless it holds a run; return the folder's digests."""
    session = hooks.session
    engine = session.checkpointer_alone(topic)
    try:
        is_start = session.rank_group.launch.cause == "start"
        if holds_run(engine) and not (is_start and _is_outdated(engine, folder)):
            return _digests(folder, is_whole=is_start)
        prepared = _prepare(hooks, folder, more, strict=_is_strict(hooks))
        return _commit(hooks, engine, folder, prepared)
    finally:
        engine.close()


def _is_outdated(engine: CheckpointEngine, folder: str) -> bool:
    """Return whether a repository has only imports of a folder that was changed since.

    No step was saved after such an import, so a new import loses nothing. The newest checkpoint
    is the one that a resume loads.
    """
    data = [read_manifest(engine.store, name).data for name in engine.committed()]
    imports = [one for one in data if one.get(IMPORTED_AS) != BEST]
    if not imports or not all(one.get(IMPORTED_DIGEST) for one in imports):
        return False
    place = Path(folder).absolute()
    if any(Path(str(one[IMPORTED_FROM])).absolute() != place for one in imports):
        return False
    return bool(imports[0][IMPORTED_DIGEST] != TransformersCheckpoint(folder).digest)


def _is_strict(hooks: TrainerHooks) -> bool:
    session = hooks.session
    return session.rank_group.launch.strict_resume or session.args.strict_resume


def _prepare(hooks: TrainerHooks, folder: str, more: Mapping[str, Part], *, strict: bool) -> Import:
    """Read and verify a folder, and check that this run can load it; nothing is committed."""
    naming, fresh = _naming(hooks), _fresh(hooks)
    prepared = prepare_import(folder, naming, hooks.model, strict=strict, fresh=fresh)
    _state_batch(prepared.parts, hooks.args.per_device_train_batch_size)
    _require_run(hooks, prepared.parts)
    replicated_parts = {name: part for name, part in more.items() if part.scope == "replicated"}
    prepared.parts.update(replicated_parts)
    return prepared


def _state_batch(parts: dict[str, Part], batch: int) -> None:
    """Take the batch size of this run if the checkpoint lost its own, as Transformers does."""
    origin = parts["data"].stateful.state_dict()["elsewhere"]
    if not origin["batch"]:
        parts["data"] = Part(RawState({"elsewhere": {**origin, "batch": batch}}))


def _commit(hooks: TrainerHooks, engine: CheckpointEngine, folder: str, prepared: Import) -> str:
    """Write a prepared import to the repository; return the digests of its folder."""
    session, source = hooks.session, prepared.source
    checkpoint = prepared.commit(engine)
    session.emit(HFCheckpointImported(folder, str(checkpoint), source.step))
    if prepared.lost:
        session.emit(ImportLossReported(folder, prepared.lost))
    if prepared.odd:
        session.emit(ImportOddityReported(folder, prepared.odd))
    if changes := changes_at_import(source.arguments(), hooks.args.to_dict()):
        session.emit(ArgumentsChanged(changes))
    return f"{source.state_digest}:{source.digest}"


def _digests(folder: str, *, is_whole: bool) -> str:
    """Return a folder's digests; a restart compares only the state's digest."""
    checkpoint = TransformersCheckpoint(folder)
    return f"{checkpoint.state_digest}:{checkpoint.digest if is_whole else ''}"


def _require_run(hooks: TrainerHooks, parts: Mapping[str, Part]) -> None:
    """Raise unless the run's data and optimizer fit the parts to be committed."""
    if hooks.train_sampler is not None:
        require_place(parts, hooks.train_sampler.cursor)
    optimizer, live = hooks.create_optimizer(), _compared(hooks)
    require_same_optimizer(parts, optimizer.param_groups)
    require_same_kinds(parts, optimizer.param_groups)
    require_step(parts, optimizer)
    require_schedule(parts, live)
    require_same_objects(parts, live, policy_for(hooks.args, ()))


def _compared(hooks: TrainerHooks) -> dict[str, Part]:
    """Return the objects of this rank that a resume compares with the saved objects."""
    model, live = hooks.model, {}
    is_plain = all(
        type(parameter) in PLAIN and not hasattr(parameter, "ds_id")
        for parameter in model.parameters()
    )
    if is_plain and not hooks.args.deepspeed and find_redirect(model) is None:
        live["model"] = Part(bare(model))
    if hooks.lr_scheduler is not None:
        live["scheduler"] = Part(ScheduleState(hooks.lr_scheduler))
    return live


def _fresh(hooks: TrainerHooks) -> FreshState:
    """Return the initial state of the run's optimizer and schedule."""
    naming = _naming(hooks)
    groups = hooks.create_optimizer().param_groups
    # With ZeRO 3 all groups of the optimizer are empty, because the engine holds the parameters.
    filled = [group for group in groups if group["params"]] or groups
    count = len(naming.trained)
    options = next((each for each in (groups, filled) if len(each) == count), filled[:1] * count)
    fresh_groups = [
        {
            **{name: value for name, value in group.items() if name != "params"},
            "params": list(names),
        }
        for group, names in zip(options, naming.trained, strict=True)
    ]
    scheduler = hooks.lr_scheduler
    schedule = ScheduleState(scheduler).state_dict() if scheduler is not None else {}
    return FreshState({"state": {}, "param_groups": fresh_groups}, schedule)


def _naming(hooks: TrainerHooks) -> Naming:
    """Return the names of a trainer's tensors."""
    groups = hooks.create_optimizer().param_groups
    # The optimizer of a pipeline stage has only parameters of the stage, and that of ZeRO 3 none.
    if pipeline_of(hooks.model) is None and any(group["params"] for group in groups):
        # With a strategy that partitions parameters, the groups have the strategy's tensors.
        with suppress(KeyError):
            return naming_of(hooks.model, groups)
    names = hooks.get_decay_parameter_names(hooks.model)
    return naming_of(hooks.model, parameter_groups(hooks.model, hooks.args.weight_decay, names))


_HINT = "resilient train --resume {folder} SCRIPT imports it with the script's own model"


@dataclass(frozen=True, slots=True)
class ImportedFolder:
    """Result of an import.

    Attributes:
        checkpoint: Name of the checkpoint in the repository.
        lost: Losses in words.
        odd: Contradictions without a known loss, and weights that were ignored.
    """

    checkpoint: CheckpointId
    lost: tuple[str, ...] = ()
    odd: tuple[str, ...] = ()


def import_folder(
    folder: str | os.PathLike[str],
    url: str,
    *,
    strict: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> ImportedFolder:
    """Write a Transformers checkpoint to an empty repository in our format.

    Transformers must be able to build its model from ``config.json``, with no parameter frozen.
    The optimizer's state is by position, and only the model maps positions to names.

    Args:
        folder: Folder saved by Transformers.
        url: URL of the repository.
        strict: Whether any loss is refused.
        storage_options: Access options; by default those of the environment.

    Raises:
        ConfigError: The repository is in use, or the model cannot be built.
        NothingToResume: The folder has no checkpoint.
        IntegrityError: The folder is damaged.
        IncompatibleCheckpoint: The optimizer belongs to another model, or there is no optimizer.
    """
    model = model_from_config(os.fspath(folder))
    naming = naming_of(model, parameter_groups(model, 1.0))
    prepared = prepare_import(folder, naming, model, strict=strict)
    engine = open_engine(url, storage_options=storage_options)
    try:
        if holds_run(engine):
            raise ConfigError(
                f"the repository `{url}` already holds {engine.committed()[0]}: a run starts only "
                "once",
                hint=f"resilient ckpt ls {shell_quote(url)}",
            )
        return ImportedFolder(prepared.commit(engine), prepared.lost, prepared.odd)
    finally:
        engine.close()


def naming_from_config(folder: str) -> Naming:
    """Return the names of the model in ``config.json``; needs no memory and no network."""
    model = model_from_config(folder)
    return naming_of(model, parameter_groups(model, 1.0))


def model_from_config(folder: str) -> nn.Module:
    """Return the model that ``config.json`` describes, without memory for its weights.

    Raises:
        ConfigError: There is no such file, or Transformers cannot build a model from it.
        NothingToResume: The folder has no checkpoint.
    """
    checkpoint = TransformersCheckpoint(folder)
    hint = _HINT.format(folder=folder)
    if not checkpoint.source.has(CONFIG):
        raise ConfigError(f"`{folder}` has no {CONFIG} to build its model from", hint=hint)
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "building a model from its configuration needs transformers",
            hint="pip install transformers",
        ) from error
    document = checkpoint.document(CONFIG)
    name = str((document.get("architectures") or ["none"])[0])
    kind = getattr(transformers, name, None)
    if kind is None or not issubclass(kind, transformers.PreTrainedModel):
        raise ConfigError(f"Transformers has no model `{name}`, which `{folder}` uses", hint=hint)
    config = kind.config_class.from_dict(document)
    with torch.device("meta"):
        model: nn.Module = kind(config)
    return model
