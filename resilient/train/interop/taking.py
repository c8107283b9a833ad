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
from typing import TYPE_CHECKING, Any

from resilient.checkpointer import About
from resilient.errors import ConfigError, IntegrityError, NoIntactCheckpoint
from resilient.events import CheckpointSkipped, Event
from resilient.format.names import CheckpointId
from resilient.showing import quoted
from resilient.start_guard import SkippedFolder, plan_takeover
from resilient.strategies.pipeline.known import pipeline_of
from resilient.train.interop.files import TransformersCheckpoint, is_transformers_folder
from resilient.train.interop.naming import Naming, naming_of
from resilient.train.interop.parts import parts_of
from resilient.train.optimizers.groups import parameter_groups
from resilient.world.agreement import agree, attempt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from resilient.checkpointer import Checkpointer
    from resilient.state.capture import Part
    from resilient.train.surface.hooks import TrainerHooks


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

    Raises:
        ConfigError: the repository held a run that began elsewhere.
    """
    if digest and (origin or {}).get("digest") != digest:
        raise ConfigError(
            f"cannot take over a checkpoint of Transformers: the repository `{repository}` holds "
            "a run already that did not begin from it",
            hint="name another `output_dir`, or go on with the run by leaving out "
            "`resume_from_checkpoint`",
        )


def import_checkpoint(
    spine: Checkpointer, folder: str, naming: Naming, more: Mapping[str, Part] | None = None
) -> CheckpointId:
    """Write a checkpoint of Transformers to an empty repository as one of ours.

    Crash: it is committed whole, or not at all.

    Args:
        spine: of one rank; a life of its own.
        folder: what Transformers saved.
        naming: of the model that is to go on.
        more: parts to save besides.

    Raises:
        IntegrityError: the folder is damaged.
        IncompatibleCheckpoint: it is of another model, or holds only a model.
        SaveFailed: it could not be made durable.
    """
    found = TransformersCheckpoint(folder)
    spine.resume({}, ref="never", cause="import")
    checkpoint = CheckpointId(spine.generation, found.step)
    parts = {**parts_of(found, naming, str(checkpoint)), **(more or {})}
    state = found.state
    data = {"epoch": state["epoch"], "imported_from": os.fspath(folder)}
    metrics = {
        name: value
        for entry in state["log_history"]
        if entry.get("step") == found.step
        for name, value in entry.items()
        if name.startswith("eval_") and isinstance(value, int | float)
    }
    spine.save(found.step, parts, About(data=data, metrics=metrics))
    spine.wait()
    return checkpoint


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
        if spine.holds_run():
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
    """Write what is asked for to the repository, unless that holds something already."""
    session = hooks.session
    found = TransformersCheckpoint(folder)
    spine = session.checkpointer_alone(topic)
    try:
        if not spine.committed():
            given = {name: part for name, part in more.items() if part.scope == "replicated"}
            checkpoint = import_checkpoint(spine, folder, _naming(hooks), given)
            session.emit(CheckpointTaken(folder, str(checkpoint), found.step, found.losses))
    finally:
        spine.close()
    return found.digest


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
