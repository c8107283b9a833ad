"""Go on with a run of Transformers: its checkpoint becomes the first of a repository of ours.

It is written there whole, by one rank, before anything is trained, and every rank resumes from
it as from any other, in whatever layout. So what was taken over survives whatever comes, and the
folder it came from is not needed any more. A repository that holds something already is gone on
with if its run began from that very checkpoint; else the request is refused.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from resilient.checkpointer import About
from resilient.environment import read_flag
from resilient.errors import (
    ConfigError,
    IncompatibleCheckpoint,
    IntegrityError,
    NoIntactCheckpoint,
    NothingToResume,
    SignatureRefused,
)
from resilient.events import CheckpointSkipped, Event, Level
from resilient.format.names import CheckpointId
from resilient.showing import quoted
from resilient.start_guard import SkippedFolder, plan_takeover
from resilient.state.capture import Part
from resilient.state.things import bare
from resilient.state.tree import PLAIN
from resilient.strategies.detour import detour_of
from resilient.strategies.pipeline.known import pipeline_of
from resilient.train.interop.files import TransformersCheckpoint, is_transformers_folder
from resilient.train.interop.import_check import (
    open_source,
    require_loadable,
    require_place,
    require_same_objects,
    require_same_optimizer,
)
from resilient.train.interop.naming import Naming, naming_of
from resilient.train.interop.parts import FreshState, RawState, documents_of, parts_of
from resilient.train.optimizers.groups import parameter_groups
from resilient.train.resuming import policy_for
from resilient.train.schedules.state import ScheduleState
from resilient.vault.registry.catalog import read_manifest
from resilient.world.agreement import agree, attempt
from resilient.world.launch import REQUIRE_SIGNATURE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from resilient.checkpointer import Checkpointer
    from resilient.train.interop.import_check import ImportSource
    from resilient.train.surface.hooks import TrainerHooks

IMPORTED_AS, BEST = "imported_as", "best"
_BEST = "the best checkpoint"


@dataclass(frozen=True, slots=True)
class CheckpointTaken(Event):
    """A checkpoint of another trainer was written to the repository as one of ours."""

    folder: str
    checkpoint: str
    step: int
    lost: tuple[str, ...] = ()

    def line(self) -> str:
        """Say from where, what it is called here, and what of it could not be taken."""
        lost = f", without {', '.join(self.lost)}" if self.lost else ""
        return f"took over step {self.step} of `{self.folder}` as {self.checkpoint}{lost}"


@dataclass(frozen=True, slots=True)
class ImportLossReported(Event):
    """A checkpoint of another trainer was imported, and a part of it was lost before."""

    level: ClassVar[Level] = Level.WARNING
    folder: str
    lost: tuple[str, ...]

    def line(self) -> str:
        """Name the losses and the command that says more."""
        return (
            f"training continues from `{self.folder}` with loss of {'; '.join(self.lost)}; "
            f"strict_resume refuses that; resilient ckpt verify {quoted(self.folder)} says more"
        )


@dataclass(frozen=True, slots=True)
class ImportOddityReported(Event):
    """A checkpoint of another trainer was imported, and its files contradict each other."""

    level: ClassVar[Level] = Level.WARNING
    folder: str
    odd: tuple[str, ...]

    def line(self) -> str:
        """Name the contradictions and the command that says more."""
        return (
            f"training continues from `{self.folder}` although {'; '.join(self.odd)}; "
            f"resilient ckpt verify {quoted(self.folder)} says more"
        )


def foreign_folder(reference: str) -> str:
    """Return the folder that a reference names, ``""`` if it names a checkpoint of ours."""
    return reference if is_transformers_folder(reference) else ""


def take_over(hooks: TrainerHooks, reference: str, more: Mapping[str, Part], topic: str) -> str:
    """Bring the checkpoint of Transformers that is asked for into the repository. Collective.

    Args:
        hooks: the trainer; its model and optimizer say the names of what is saved by position.
        reference: Reference that this attempt begins from, as the resume policy settled it.
        more: parts that Transformers knows nothing of; they begin as they are.
        topic: of this training.

    Returns:
        The digest of what was asked for, for :func:`require_origin`; empty if it was nothing of
        Transformers.

    Raises:
        IntegrityError: the folder is damaged.
        IncompatibleCheckpoint: it is of another model, or holds only a model.
        NoIntactCheckpoint: no folder was named, and each one of the run is damaged or incomplete.
    """
    session = hooks.session
    if reference == "never":
        return ""
    take = _take_newest if reference == "auto" else _take_named
    is_mine = session.world.is_coordinator
    work = attempt(lambda: take(hooks, reference, more, topic)) if is_mine else ""
    comms, seconds = session.comms(f"taking/{topic}"), session.args.save_within_seconds
    try:
        taken: str = agree(comms, "taken", work, lambda shown: shown[0], seconds)
    finally:
        comms.close()
    return taken


def require_origin(origin: Mapping[str, Any] | None, digest: str, repository: str) -> None:
    """Raise unless what was resumed began from the checkpoint that was asked for.

    Args:
        origin: Origin that the resumed checkpoint tells.
        digest: As :func:`take_over` returned it.
        repository: Its place.

    Raises:
        ConfigError: the repository held a run that began elsewhere.
    """
    if digest and not _is_origin(origin or {}, *digest.split(":")):
        raise ConfigError(
            f"cannot take over a checkpoint of Transformers: the repository `{repository}` holds "
            "a run already that did not begin from it",
            hint="name another `output_dir`, or go on with the run by leaving out "
            "`resume_from_checkpoint`",
        )


def _is_origin(origin: Mapping[str, Any], state_digest: str, digest: str) -> bool:
    """Say whether a run began from a folder; an older origin has the digest of its state alone."""
    if "state_digest" not in origin:
        return origin.get("digest") == state_digest
    return origin["state_digest"] == state_digest and digest in ("", origin["digest"])


@dataclass(frozen=True, slots=True)
class Import:
    """Everything that an import commits, checked and in memory.

    Attributes:
        source: The folder.
        parts: What the checkpoint will hold; its own name is not known yet.
        best: What the best model's checkpoint will hold, and its step; None without one.
        lost: What is lost, in words.
        odd: Findings of ``ckpt verify`` without a known loss.
    """

    source: TransformersCheckpoint
    parts: dict[str, Part]
    best: tuple[int, dict[str, Part]] | None
    lost: tuple[str, ...]
    odd: tuple[str, ...] = ()

    def commit(self, spine: Checkpointer) -> CheckpointId:
        """Claim a generation and write the checkpoint, behind that of the best model.

        Crash: it is committed whole, or not at all. The best model alone may be left, which the
        next import passes over.

        Raises:
            IntegrityError: the folder changed since it was read; nothing was claimed.
            SaveFailed: it could not be made durable.
        """
        found, parts = self.source, dict(self.parts)
        found.source.require_unchanged()
        spine.resume({}, ref="never", cause="import")
        checkpoint = CheckpointId(spine.generation, found.step)
        keep: tuple[CheckpointId, ...] = ()
        if self.best is not None:
            step, held = self.best
            data = {"imported_from": os.fspath(found.folder), IMPORTED_AS: BEST}
            spine.save(step, held, About(config={"save_only_model": True}, data=data))
            spine.wait()
            keep = (CheckpointId(spine.generation, step),)
            parts["best"] = Part(RawState({"checkpoint": str(keep[0])}))
        elif found.state.get("best_global_step") == found.step:
            parts["best"] = Part(RawState({"checkpoint": str(checkpoint)}))
        spine.save(found.step, parts, self._about(), keep=keep)
        spine.wait()
        return checkpoint

    def _about(self) -> About:
        state = self.source.state
        metrics = {
            name: value
            for entry in state["log_history"]
            if entry.get("step") == self.source.step
            for name, value in entry.items()
            if name.startswith("eval_") and isinstance(value, int | float)
        }
        data = {"epoch": state["epoch"], "imported_from": os.fspath(self.source.folder)}
        return About(data=data, metrics=metrics)


def prepare_import(
    folder: str | os.PathLike[str],
    naming: Naming,
    model: nn.Module | None,
    *,
    strict: bool = False,
    fresh: FreshState | None = None,
) -> Import:
    """Read a checkpoint of Transformers and check that it can be loaded; nothing is committed.

    Args:
        folder: what Transformers saved.
        naming: of the model that is to go on.
        model: The model that will load it; None if it cannot be compared.
        strict: Whether any loss is refused.
        fresh: Optimizer and schedule as new, for a folder that lost one of both.

    Raises:
        NothingToResume: the folder holds no checkpoint.
        IntegrityError: the judge calls it not resumable.
        IncompatibleCheckpoint: it is of another model, or ``strict`` refuses what is lost.
        SignatureRefused: ``RESILIENT_REQUIRE_SIGNATURE`` is set: another tool signs nothing.
    """
    _refuse_unsigned(os.fspath(folder))
    source = open_source(os.fspath(folder), strict=strict)
    parts = parts_of(source.found, naming, "", fresh)
    if model is not None:
        require_loadable(parts, model)
    best, lost = best_of(source, naming, model)
    if strict and lost != source.lost:
        raise IncompatibleCheckpoint(
            f"cannot import `{folder}`: the best checkpoint of its run is lost, and strict_resume "
            "refuses a loss. Nothing was committed",
            hint=f"resilient ckpt inspect {quoted(os.fspath(folder))}",
        )
    return Import(source.found, parts, best, lost, source.odd)


def best_of(
    source: ImportSource, naming: Naming, model: nn.Module | None
) -> tuple[tuple[int, dict[str, Part]] | None, tuple[str, ...]]:
    """Return the best model of a run, if it lies beside the folder, and all that is lost.

    Only the folder ``checkpoint-<best step>`` beside it is opened, wherever its path leads.
    """
    found, lost = source.found, source.lost
    step = found.state.get("best_global_step")
    if type(step) is not int or step == found.step or not found.state.get("best_model_checkpoint"):
        return None, lost
    told = lost if _BEST in lost else (*lost, _BEST)
    folder = found.folder.absolute().parent / f"checkpoint-{step}"
    if step > found.step or not is_transformers_folder(folder):
        return None, told
    try:
        other = open_source(folder).found
        parts = {"model": Part(RawState(naming.complete(other.weights()))), **documents_of(other)}
        if model is not None:
            require_loadable(parts, model)
        other.source.require_unchanged()
    except (IntegrityError, IncompatibleCheckpoint, NothingToResume):
        return None, told
    return (step, parts), lost


def holds_run(spine: Checkpointer) -> bool:
    """Say whether a repository holds more than the best model of an import that was killed."""
    held = spine.committed()
    if not held:
        return spine.holds_run()
    return any(read_manifest(spine.store, one).data.get(IMPORTED_AS) != BEST for one in held)


def _refuse_unsigned(folder: str) -> None:
    """Refuse a folder of another tool where a signature is required.

    Raises:
        SignatureRefused: it is required.
    """
    if read_flag(os.environ, REQUIRE_SIGNATURE):
        raise SignatureRefused(
            f"`{folder}` is of another tool and not signed, and a signature is required; nothing "
            "was imported",
            key=folder,
            hint=f"if you trust it: {REQUIRE_SIGNATURE}=0 resilient ckpt import {quoted(folder)} "
            "REPO",
        )


def _take_newest(hooks: TrainerHooks, _: str, more: Mapping[str, Part], topic: str) -> str:
    """Write the newest intact checkpoint of Transformers in the output folder to the repository.

    A repository that holds a run is left as it is.

    Raises:
        NoIntactCheckpoint: there are checkpoints of Transformers, and none of them is intact.
    """
    session = hooks.session
    plan = plan_takeover(session.args.output_dir)
    if not plan.intact and not plan.skipped:
        return ""
    spine = session.checkpointer_alone(f"{topic}/look")
    try:
        if holds_run(spine):
            return ""
    finally:
        spine.close()
    broken: list[SkippedFolder] = []
    for number, folder in enumerate(plan.intact):
        for one in (*plan.newer_than(folder), *broken):
            session.emit(CheckpointSkipped(one.path, one.reason))
        plan, broken = replace(plan, skipped=plan.not_newer_than(folder)), []
        try:
            return _take(hooks, folder, more, f"{topic}/{number}")
        except SignatureRefused:
            raise
        except IntegrityError as error:
            broken = [SkippedFolder(folder, error.message)]
    raise _nothing_intact(session.args.output_dir, (*broken, *plan.skipped))


def _nothing_intact(output: str, skipped: Sequence[SkippedFolder]) -> NoIntactCheckpoint:
    reasons = "; ".join(f"{one.path}: {one.reason}" for one in skipped)
    lossy = next((one for one in skipped if one.is_lossy), None)
    if lossy is not None:
        first = f"to continue with that loss: resilient train --resume {quoted(lossy.path)} SCRIPT"
    else:
        first = f"resilient ckpt inspect {quoted(skipped[0].path)}"
    return NoIntactCheckpoint(
        f"no checkpoint of Transformers in `{output}` is intact, and training will not start "
        f"over by itself: {reasons}",
        hint=f"{first}; to start at step 0: --resume never, or resume_from_checkpoint=False",
    )


def _take_named(hooks: TrainerHooks, reference: str, more: Mapping[str, Part], topic: str) -> str:
    """Write the folder that the reference names to the repository, if it names a folder."""
    folder = foreign_folder(reference)
    return _take(hooks, folder, more, topic) if folder else ""


def _take(hooks: TrainerHooks, folder: str, more: Mapping[str, Part], topic: str) -> str:
    """Write a folder to the repository, unless that holds a run; return what tells the folder."""
    session = hooks.session
    spine = session.checkpointer_alone(topic)
    try:
        if holds_run(spine):
            return _digests(folder, is_whole=session.gang.launch.cause == "start")
        made = prepare_import(
            folder,
            _naming(hooks),
            hooks.model,
            strict=session.gang.launch.strict_resume or session.args.strict_resume,
            fresh=_fresh(hooks),
        )
        _require_run(hooks, made.parts)
        given = {name: part for name, part in more.items() if part.scope == "replicated"}
        made.parts.update(given)
        checkpoint = made.commit(spine)
        session.emit(CheckpointTaken(folder, str(checkpoint), made.source.step))
        if made.lost:
            session.emit(ImportLossReported(folder, made.lost))
        if made.odd:
            session.emit(ImportOddityReported(folder, made.odd))
    finally:
        spine.close()
    return f"{made.source.state_digest}:{made.source.digest}"


def _digests(folder: str, *, is_whole: bool) -> str:
    """Return what tells a folder; a restart compares its state alone and reads no weights."""
    found = TransformersCheckpoint(folder)
    return f"{found.state_digest}:{found.digest if is_whole else ''}"


def _require_run(hooks: TrainerHooks, parts: Mapping[str, Part]) -> None:
    """Raise unless the data and the optimizer of the run take what would be committed."""
    if hooks.train_sampler is not None:
        require_place(parts, hooks.train_sampler.cursor)
    require_same_optimizer(parts, hooks.create_optimizer().param_groups)
    require_same_objects(parts, _compared(hooks), policy_for(hooks.args, ()))


def _compared(hooks: TrainerHooks) -> dict[str, Part]:
    """Return the objects that a resume compares with what was saved, as far as they lie here."""
    model, live = hooks.model, {}
    is_plain = all(type(one) in PLAIN and not hasattr(one, "ds_id") for one in model.parameters())
    if is_plain and not hooks.args.deepspeed and detour_of(model) is None:
        live["model"] = Part(bare(model))
    if hooks.lr_scheduler is not None:
        live["scheduler"] = Part(ScheduleState(hooks.lr_scheduler))
    return live


def _fresh(hooks: TrainerHooks) -> FreshState:
    """Return the state of the run's optimizer and schedule, which made no step yet."""
    naming = _naming(hooks)
    groups = hooks.create_optimizer().param_groups
    # The groups of ZeRO 3 are empty in the optimizer: its engine holds their parameters.
    filled = [group for group in groups if group["params"]] or groups
    options = filled if len(filled) == len(naming.trained) else filled[:1] * len(naming.trained)
    held = [
        {**{name: one for name, one in group.items() if name != "params"}, "params": list(names)}
        for group, names in zip(options, naming.trained, strict=True)
    ]
    scheduler = hooks.lr_scheduler
    schedule = ScheduleState(scheduler).state_dict() if scheduler is not None else {}
    return FreshState({"state": {}, "param_groups": held}, schedule)


def _naming(hooks: TrainerHooks) -> Naming:
    """Return the names of a trainer's tensors."""
    groups = hooks.create_optimizer().param_groups
    # An optimizer of a stage has that stage's alone in its groups, one of ZeRO 3 has none there.
    if pipeline_of(hooks.model) is None and any(group["params"] for group in groups):
        # Whoever partitions the parameters keeps its own in the groups.
        with suppress(KeyError):
            return naming_of(hooks.model, groups)
    names = hooks.get_decay_parameter_names(hooks.model)
    return naming_of(hooks.model, parameter_groups(hooks.model, hooks.args.weight_decay, names))
