"""Import of a Transformers checkpoint as the first checkpoint of one of our repositories.

One rank writes it there completely before anything is trained. Every rank then resumes from it as
from any other checkpoint, in any layout, and the source folder is no longer needed. A repository
that is not empty continues only if its run began from that very checkpoint; else the request is
refused.

The names of a model's tensors follow from the model alone. Without a training script, the model
is built from its configuration.
"""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from resilient.checkpoint.catalog import read_manifest
from resilient.checkpoint.save.metadata import CheckpointInfo
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
    SignatureRefused,
)
from resilient.events import CheckpointSkipped, Event, Level
from resilient.format.keys import CheckpointId, rank_part
from resilient.layouts.consistency import epoch_of
from resilient.redaction import shell_quote
from resilient.start_guard import STEP_FOLDER, SkippedFolder, plan_takeover
from resilient.state_dict.flatten import PLAIN
from resilient.state_dict.snapshot import Part
from resilient.state_dict.statefuls import bare
from resilient.storage.open import local_root
from resilient.strategies.module_wrapper import find_redirect, named_in
from resilient.strategies.pipeline.registry import pipeline_of
from resilient.train.data.ordering import seen_of
from resilient.train.hf_interop.checkpoint import (
    CONFIG,
    TransformersCheckpoint,
    is_transformers_folder,
)
from resilient.train.hf_interop.import_check import (
    open_source,
    require_loadable,
    require_place,
    require_same_objects,
    require_same_optimizer,
)
from resilient.train.model.artifacts import DOCUMENTS, adapter_of, is_adapted
from resilient.train.optimizers.builtin import parameter_groups
from resilient.train.saver import policy_for
from resilient.train.schedules.factory import ScheduleState
from resilient.train.state import TrainerState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn

    from resilient.checkpoint_engine import CheckpointEngine
    from resilient.train.hf_interop.import_check import ImportSource
    from resilient.train.trainer_hooks import TrainerHooks

_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs")
_FLAGS = ("should_training_stop", "should_epoch_stop")
_LIKE_WEIGHT = ("exp_avg", "exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "sum")
"""Optimizer state in the shape of its parameter."""


@dataclass(frozen=True, slots=True)
class RawState:
    """State that is saved as it was given."""

    state: Mapping[str, Any]

    def state_dict(self) -> Mapping[str, Any]:
        """Return the given state."""
        return self.state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing: the state is only saved."""


@dataclass(frozen=True, slots=True)
class FreshState:
    """Initial state of an optimizer and a schedule, for a folder that lost one of them.

    Attributes:
        optimizer: State by parameter name.
        scheduler: State for the same groups.
    """

    optimizer: Mapping[str, Any]
    scheduler: Mapping[str, Any]


def parts_of(
    found: TransformersCheckpoint, naming: Naming, best: str, fresh: FreshState | None = None
) -> dict[str, Part]:
    """Return all parts of our checkpoint, in loading order.

    Args:
        found: Checkpoint saved by Transformers.
        naming: Names of the model that will continue.
        best: Name of the new checkpoint, recorded as the best if it holds the best model.
        fresh: Initial optimizer and schedule, for a folder that lost one of them.

    Raises:
        IncompatibleCheckpoint: It holds no optimizer, or that of another model.
        IntegrityError: A file is damaged, or its files are of several checkpoints.
    """
    weights = naming.complete(found.weights())
    state = found.state
    is_best = state.get("best_global_step") == found.step
    scaler = found.scaler()
    whole: dict[str, Mapping[str, Any]] = {
        "model": weights,
        **_progress(found, naming, weights, fresh),
        **({"scaler": scaler} if scaler is not None else {}),
        "data": {"elsewhere": origin_of(found)},
        "callbacks": callback_states(state),
        "best": {"checkpoint": best if is_best else ""},
    }
    parts = {name: Part(RawState(value)) for name, value in whole.items()}
    parts |= documents_of(found)
    for rank in range(found.ranks):
        # Each rank finds its part by name, no matter which rank wrote it.
        parts[rank_part("meters", rank)] = Part(RawState(_meters(state)))
        random = found.random_state(rank)
        if random is not None:
            parts[rank_part("rng_state", rank)] = Part(RawState(random))
    return parts


def documents_of(found: TransformersCheckpoint) -> dict[str, Part]:
    """Return the parts that are JSON files: the trainer's state and the model's configurations."""
    parts = {
        "trainer_state": Part(RawState(trainer_state(found.state)), document="trainer_state.json")
    }
    for name, file in DOCUMENTS.items():
        if found.source.has(file):
            parts[name] = Part(RawState(found.document(file)), document=file)
    return parts


def _progress(
    found: TransformersCheckpoint,
    naming: Naming,
    weights: Mapping[str, torch.Tensor],
    fresh: FreshState | None,
) -> dict[str, Mapping[str, Any]]:
    """Return optimizer and schedule; as in Transformers both restart if one is lost.

    Raises:
        IncompatibleCheckpoint: One is lost, and there is no initial state.
    """
    if fresh is not None and not found.has_progress:
        return {"optimizer": fresh.optimizer, "scheduler": fresh.scheduler}
    optimizer, kept = named_optimizer(found, naming, weights)
    return {"optimizer": optimizer, "scheduler": _of_groups(found.scheduler(), kept)}


def named_optimizer(
    found: TransformersCheckpoint, naming: Naming, weights: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Any], list[int]]:
    """Return the optimizer's state by name, and the numbers of its groups with parameters.

    Raises:
        IncompatibleCheckpoint: Its parameters or shapes are not the model's.
    """
    plain = found.optimizer()
    if any(isinstance(name, str) for group in plain["param_groups"] for name in group["params"]):
        return _by_name(found, plain, naming, weights)
    kept = [nth for nth, group in enumerate(plain["param_groups"]) if group["params"]]
    groups = [plain["param_groups"][nth] for nth in kept]
    counts = [len(group["params"]) for group in groups]
    if counts != [len(names) for names in naming.trained]:
        raise IncompatibleCheckpoint(
            f"the optimizer in `{found.folder}` has groups of {counts} parameters, and that of "
            f"this model {[len(names) for names in naming.trained]}",
            hint="train the same model, with the same parameters frozen and decayed",
        )
    names = {
        number: name
        for group, own in zip(groups, naming.trained, strict=True)
        for number, name in zip(group["params"], own, strict=True)
    }
    state = {names[number]: dict(value) for number, value in plain["state"].items()}
    _require_fit(found, state, weights)
    renamed = [
        {**group, "params": list(own)} for group, own in zip(groups, naming.trained, strict=True)
    ]
    return {**plain, "state": state, "param_groups": renamed}, kept


def _by_name(
    found: TransformersCheckpoint,
    plain: Mapping[str, Any],
    naming: Naming,
    weights: Mapping[str, torch.Tensor],
) -> tuple[dict[str, Any], list[int]]:
    """Return FSDP's or DeepSpeed's state by name; the resume checks the groups' owners."""
    # A tensor with several names may be trained under different names here and there.
    trained = {name for names in naming.trained for name in names}
    ours = {
        name: next((alias for alias in names if alias in trained), name)
        for names in naming.tied
        for name in names
    }
    groups = [
        {**group, "params": [ours.get(name, name) for name in group["params"]]}
        for group in plain["param_groups"]
    ]
    held = {name for group in groups for name in group["params"]}
    if held != trained:
        differ = sorted(held ^ trained)
        raise IncompatibleCheckpoint(
            f"the optimizer in `{found.folder}` and that of this model differ in `{differ[0]}` and "
            f"{len(differ) - 1} more parameters",
            hint="train the same model, with the same parameters frozen",
        )
    state = {ours.get(name, name): dict(value) for name, value in plain["state"].items()}
    _require_fit(found, state, weights)
    places = {
        frozenset(group["params"]): nth for nth, group in enumerate(groups) if group["params"]
    }
    own = [frozenset(names) for names in naming.trained]
    # In the order of this model's groups, as required for a schedule's values by group.
    kept = (
        [places[members] for members in own] if set(own) == set(places) else list(places.values())
    )
    return {"state": state, "param_groups": [groups[nth] for nth in kept]}, kept


def _require_fit(
    found: TransformersCheckpoint,
    state: Mapping[str, Mapping[str, Any]],
    weights: Mapping[str, torch.Tensor],
) -> None:
    """Raise if moments do not have the shape of their parameter."""
    for name, value in state.items():
        for kind in _LIKE_WEIGHT:
            moment = value.get(kind)
            if moment is None or name not in weights or moment.shape == weights[name].shape:
                continue
            raise IncompatibleCheckpoint(
                f"the moments of `{name}` in `{found.folder}` have the shape "
                f"{tuple(moment.shape)}, and it has {tuple(weights[name].shape)}",
                hint="the model names its parameters in another order than the one that was saved",
            )


def _of_groups(scheduler: Mapping[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """Return a scheduler's state reduced to the kept groups."""
    return {
        name: [value[nth] for nth in kept]
        if name in _BY_GROUP and isinstance(value, list) and len(value) > max(kept, default=-1)
        else value
        for name, value in scheduler.items()
    }


def origin_of(found: TransformersCheckpoint) -> dict[str, Any]:
    """Return the origin of the run and its position in the data."""
    return {
        "trainer": "transformers",
        "folder": found.folder.name,
        "digest": found.digest,
        "state_digest": found.state_digest,
        # The import locates its position in the data by the epoch, Transformers by the step.
        "epoch": float(epoch_of(found.state) or 0.0),
        "batch": int(found.state.get("train_batch_size") or 0),
        "ranks": found.ranks,
        **seen_of(found.random_state(0), found.state["log_history"]),
    }


def trainer_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known fields, with the best checkpoint's name without its folder."""
    known = {attribute.name for attribute in fields(TrainerState)}
    taken = {name: value for name, value in state.items() if name in known}
    best = taken.get("best_global_step")
    return {**taken, "best_model_checkpoint": f"checkpoint-{best}" if best is not None else None}


def callback_states(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of each callback by name; the second of a class is ``Name_2``."""
    states: dict[str, Any] = {}
    for name, saved in (state.get("stateful_callbacks") or {}).items():
        for nth, callback in enumerate(saved if isinstance(saved, list) else [saved], 1):
            taken = dict(callback.get("attributes") or {})
            states[name if nth == 1 else f"{name}_{nth}"] = taken
    flags = ((state.get("stateful_callbacks") or {}).get("TrainerControl") or {}).get("args", {})
    control = {name: bool(flags.get(name)) for name in _FLAGS}
    # A save on SIGTERM sets this flag, and Transformers clears it when training starts.
    control["should_training_stop"] = control["should_training_stop"] and _has_ended(state)
    return {**states, "TrainerControl": control}


def _has_ended(state: Mapping[str, Any]) -> bool:
    """Return whether early stopping ended the run, by the state of its callback."""
    counter, patience = "early_stopping_patience_counter", "early_stopping_patience"
    for saved in (state.get("stateful_callbacks") or {}).values():
        for callback in saved if isinstance(saved, list) else [saved]:
            waited = (callback.get("attributes") or {}).get(counter)
            if isinstance(waited, int) and waited >= (callback.get("args") or {}).get(patience, 1):
                return True
    return False


def _meters(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sums of the logged losses; losses not logged are not recorded."""
    summed, steps, last = 0.0, 0, {}
    for entry in state["log_history"]:
        if "loss" in entry:
            summed += entry["loss"] * (entry["step"] - steps)
            steps, last = entry["step"], entry
    return {
        "recent": torch.zeros((), dtype=torch.float64),
        "logged": torch.tensor(summed, dtype=torch.float64),
        "grad_norm": torch.tensor(float(last.get("grad_norm", 0.0))),
        "recent_steps": 0,
        "logged_steps": steps,
        "learning_rate": float(last.get("learning_rate", 0.0)),
    }


@dataclass(frozen=True, slots=True)
class Naming:
    """Names that a checkpoint by position lacks.

    Attributes:
        trained: Names of the parameters of each of the optimizer's groups, in its order.
        tied: Names of one and the same tensor, of which a weight file holds only one.
        adapter: Names in a file of PEFT's -> the model's names; empty without an adapter.
        base: Tensors of an adapted model, of which such a file holds only a few.
    """

    trained: tuple[tuple[str, ...], ...]
    tied: tuple[tuple[str, ...], ...]
    adapter: Mapping[str, str] = field(default_factory=dict)
    base: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def complete(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return all tensors of the model, completed from those in a file."""
        if not self.adapter:
            return tie(tensors, self.tied)
        return {
            **self.base,
            **{self.adapter.get(key, key): tensor for key, tensor in tensors.items()},
        }


def naming_of(model: nn.Module, groups: Iterable[Mapping[str, Any]]) -> Naming:
    """Return the names of a model's tensors and of an optimizer's parameters.

    Args:
        model: The plain module; it may be on the meta device.
        groups: ``param_groups`` of the optimizer.

    Raises:
        KeyError: A group holds a parameter that is not the model's.
        ConfigError: The base of an adapter is in flat shards.
    """
    names: dict[int, str] = {}
    firsts: dict[int, str] = {}
    for parameter in named_in(model):
        if parameter.held() is not None:
            names.setdefault(parameter.number, parameter.name)
        if parameter.is_trained:
            firsts.setdefault(parameter.number, parameter.name)
    parameter_ids = [[id(parameter) for parameter in group["params"]] for group in groups]
    trained: tuple[tuple[str, ...], ...] = (tuple(firsts.values()),)
    is_flat = (
        find_redirect(model) is not None
        and len(parameter_ids) == 1
        and names.keys().isdisjoint(parameter_ids[0])
    )
    if not is_flat:  # else flat vectors hold all trained parameters
        trained = tuple(tuple(names[number] for number in numbers) for numbers in parameter_ids)
    naming = Naming(trained, tied_names(model))
    if not is_adapted(model):
        return naming
    if find_redirect(model) is not None:
        raise ConfigError(
            "an adapter's checkpoint of Transformers cannot be taken over into FSDP1, which does "
            "not give away the tensors of its base",
            hint="take it over without fsdp first, or write version=2 in fsdp_config",
        )
    return replace(naming, adapter=adapter_of(model)["names"], base=model.state_dict())


def tied_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the names of each parameter that has several."""
    known: defaultdict[int, list[str]] = defaultdict(list)
    for parameter in named_in(model):
        known[parameter.number].append(parameter.name)
    return tuple(tuple(names) for names in known.values() if len(names) > 1)


def tie(
    tensors: Mapping[str, torch.Tensor], tied: Sequence[Sequence[str]]
) -> dict[str, torch.Tensor]:
    """Return the tensors completed by the other names of tied tensors."""
    whole = dict(tensors)
    for names in tied:
        tensor = next((tensors[name] for name in names if name in tensors), None)
        if tensor is not None:
            whole |= {name: tensor for name in names if name not in tensors}
    return whole


IMPORTED_AS, BEST = "imported_as", "best"
_BEST = "the best checkpoint"


@dataclass(frozen=True, slots=True)
class HFCheckpointImported(Event):
    """A checkpoint of another trainer was written to the repository as one of ours."""

    folder: str
    checkpoint: str
    step: int
    lost: tuple[str, ...] = ()

    def message(self) -> str:
        """Format the source, the new name and the losses."""
        lost = f", without {', '.join(self.lost)}" if self.lost else ""
        return f"took over step {self.step} of `{self.folder}` as {self.checkpoint}{lost}"


@dataclass(frozen=True, slots=True)
class ImportLossReported(Event):
    """A checkpoint of another trainer was imported, and a part of it had been lost before."""

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
    """Return the folder that a reference names; ``""`` for a checkpoint of ours."""
    return reference if is_transformers_folder(reference) else ""


def import_hf_run(hooks: TrainerHooks, reference: str, more: Mapping[str, Part], topic: str) -> str:
    """Import the requested Transformers checkpoint into the repository. Collective.

    Args:
        hooks: Trainer; its model and optimizer give the names of state saved by position.
        reference: Reference that this attempt begins from, as the resume policy settled it.
        more: Parts unknown to Transformers; they begin unchanged.
        topic: Name of this training.

    Returns:
        Digests of the requested folder, for :func:`require_origin`; empty if no Transformers
        checkpoint was requested.

    Raises:
        IntegrityError: The folder is damaged.
        IncompatibleCheckpoint: It is of another model, or holds only a model.
        NoIntactCheckpoint: No folder was named, and all of the run's are damaged or incomplete.
    """
    session = hooks.session
    if reference == "never":
        return ""
    take = _take_newest if reference == "auto" else _take_named
    is_mine = session.world.is_coordinator
    work = capture_failure(lambda: take(hooks, reference, more, topic)) if is_mine else ""
    comms, seconds = session.comms(f"taking/{topic}"), session.args.save_within_seconds
    try:
        taken: str = agree(comms, "taken", work, lambda shown: shown[0], seconds)
    finally:
        comms.close()
    return taken


def require_origin(origin: Mapping[str, Any] | None, digest: str, repository: str) -> None:
    """Raise unless the resumed run began from the requested checkpoint.

    Args:
        origin: Origin recorded in the resumed checkpoint.
        digest: Result of :func:`import_hf_run`.
        repository: URL of the repository.

    Raises:
        ConfigError: The repository held a run that began from another checkpoint.
    """
    if digest and not _is_origin(origin or {}, *digest.split(":")):
        raise ConfigError(
            f"cannot take over a checkpoint of Transformers: the repository `{repository}` holds "
            "a run already that did not begin from it",
            hint="name another `output_dir`, or go on with the run by leaving out "
            "`resume_from_checkpoint`",
        )


def _is_origin(origin: Mapping[str, Any], state_digest: str, digest: str) -> bool:
    """Return whether a run began from a folder; an older origin has only the state's digest."""
    if "state_digest" not in origin:
        return origin.get("digest") == state_digest
    return origin["state_digest"] == state_digest and digest in ("", origin["digest"])


@dataclass(frozen=True, slots=True)
class Import:
    """All data that an import commits, checked and in memory.

    Attributes:
        source: The folder.
        parts: Parts of the checkpoint; its own name is not known yet.
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
        """Claim a generation and write the checkpoint, after that of the best model.

        Crash: the checkpoint is committed completely, or not at all. The best model alone may
        remain; the next import ignores it.

        Raises:
            IntegrityError: The folder changed since it was read; nothing was claimed.
            SaveFailed: The checkpoint could not be made durable.
        """
        found, parts = self.source, dict(self.parts)
        found.source.require_unchanged()
        engine.resume({}, ref="never", cause="import")
        checkpoint = CheckpointId(engine.generation, found.step)
        keep: tuple[CheckpointId, ...] = ()
        if self.best is not None:
            step, best_parts = self.best
            data = {"imported_from": os.fspath(found.folder), IMPORTED_AS: BEST}
            engine.save(
                step, best_parts, CheckpointInfo(config={"save_only_model": True}, data=data)
            )
            engine.wait()
            keep = (CheckpointId(engine.generation, step),)
            parts["best"] = Part(RawState({"checkpoint": str(keep[0])}))
        elif found.state.get("best_global_step") == found.step:
            parts["best"] = Part(RawState({"checkpoint": str(checkpoint)}))
        engine.save(found.step, parts, self._about(), keep=keep)
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
        data = {"epoch": state["epoch"], "imported_from": os.fspath(self.source.folder)}
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
        model: The model that will load it; None if it cannot be compared.
        strict: Whether any loss is refused.
        fresh: Initial optimizer and schedule, for a folder that lost one of them.

    Raises:
        NothingToResume: The folder holds no checkpoint.
        IntegrityError: The verdict is "not resumable".
        IncompatibleCheckpoint: It is of another model, or ``strict`` refuses its losses.
        SignatureRefused: ``RESILIENT_REQUIRE_SIGNATURE`` is set: folders of other tools are never
            signed.
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
            hint=f"resilient ckpt inspect {shell_quote(os.fspath(folder))}",
        )
    return Import(source.found, parts, best, lost, source.odd)


def best_of(
    source: ImportSource, naming: Naming, model: nn.Module | None
) -> tuple[tuple[int, dict[str, Part]] | None, tuple[str, ...]]:
    """Return the best model of a run, if it is beside the folder, and all losses.

    Only the folder ``checkpoint-<best step>`` beside it is opened, for any recorded path.
    """
    found, lost = source.found, source.lost
    step = found.state.get("best_global_step")
    if type(step) is not int or step == found.step or not found.state.get("best_model_checkpoint"):
        return None, lost
    losses = lost if _BEST in lost else (*lost, _BEST)
    folder = found.folder.absolute().parent / f"checkpoint-{step}"
    if step > found.step or not is_transformers_folder(folder):
        return None, losses
    try:
        other = open_source(folder).found
        parts = {"model": Part(RawState(naming.complete(other.weights()))), **documents_of(other)}
        if model is not None:
            require_loadable(parts, model)
        other.source.require_unchanged()
    except (IntegrityError, IncompatibleCheckpoint, NothingToResume):
        return None, losses
    return (step, parts), lost


def holds_run(engine: CheckpointEngine) -> bool:
    """Return whether a repository holds more than a killed import's best model."""
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
            f"`{folder}` is of another tool and not signed, and a signature is required; nothing "
            "was imported",
            key=folder,
            hint=f"if you trust it: {REQUIRE_SIGNATURE}=0 "
            f"resilient ckpt import {shell_quote(folder)} REPO",
        )


def _take_newest(hooks: TrainerHooks, _: str, more: Mapping[str, Part], topic: str) -> str:
    """Write the newest intact Transformers checkpoint of the output folder to the repository.

    A repository that holds a run is left unchanged.

    Raises:
        NoIntactCheckpoint: There are Transformers checkpoints, and none of them is intact.
    """
    session = hooks.session
    if not _holds_step_folder(session.args.output_dir):
        return ""
    plan = plan_takeover(session.args.output_dir)
    if not plan.intact and not plan.skipped:
        return ""
    engine = session.checkpointer_alone(f"{topic}/look")
    try:
        if holds_run(engine):
            return ""
    finally:
        engine.close()
    broken: list[SkippedFolder] = []
    for number, folder in enumerate(plan.intact):
        for skip in (*plan.newer_than(folder), *broken):
            session.emit(CheckpointSkipped(skip.path, skip.reason))
        plan, broken = replace(plan, skipped=plan.not_newer_than(folder)), []
        try:
            return _take(hooks, folder, more, f"{topic}/{number}")
        except SignatureRefused:
            raise
        except IntegrityError as error:
            broken = [SkippedFolder(folder, error.message)]
    raise _nothing_intact(session.args.output_dir, (*broken, *plan.skipped))


def _holds_step_folder(output: str) -> bool:
    """Return whether an output folder may hold Transformers checkpoints.

    Most do not, and the search for the layout of each checkpoint reads all names below the folder.
    """
    root = local_root(output)
    if root is None:
        return False
    try:
        return any(STEP_FOLDER.fullmatch(path.name) for path in root.iterdir())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False


def _nothing_intact(output: str, skipped: Sequence[SkippedFolder]) -> NoIntactCheckpoint:
    reasons = "; ".join(f"{skip.path}: {skip.reason}" for skip in skipped)
    lossy = next((skip for skip in skipped if skip.is_lossy), None)
    if lossy is not None:
        first = (
            f"to continue with that loss: resilient train --resume {shell_quote(lossy.path)} SCRIPT"
        )
    else:
        first = f"resilient ckpt inspect {shell_quote(skipped[0].path)}"
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
    """Write a folder to the repository, unless it holds a run; return the folder's digests."""
    session = hooks.session
    engine = session.checkpointer_alone(topic)
    try:
        if holds_run(engine):
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
        checkpoint = made.commit(engine)
        session.emit(HFCheckpointImported(folder, str(checkpoint), made.source.step))
        if made.lost:
            session.emit(ImportLossReported(folder, made.lost))
        if made.odd:
            session.emit(ImportOddityReported(folder, made.odd))
    finally:
        engine.close()
    return f"{made.source.state_digest}:{made.source.digest}"


def _digests(folder: str, *, is_whole: bool) -> str:
    """Return a folder's digests; a restart compares only the state and reads no weights."""
    found = TransformersCheckpoint(folder)
    return f"{found.state_digest}:{found.digest if is_whole else ''}"


def _require_run(hooks: TrainerHooks, parts: Mapping[str, Part]) -> None:
    """Raise unless the run's data and optimizer fit the parts to be committed."""
    if hooks.train_sampler is not None:
        require_place(parts, hooks.train_sampler.cursor)
    require_same_optimizer(parts, hooks.create_optimizer().param_groups)
    require_same_objects(parts, _compared(hooks), policy_for(hooks.args, ()))


def _compared(hooks: TrainerHooks) -> dict[str, Part]:
    """Return the objects that a resume compares with the saved ones, if they are on this rank."""
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
    # With ZeRO 3 the optimizer's groups are empty: its engine holds their parameters.
    filled = [group for group in groups if group["params"]] or groups
    options = filled if len(filled) == len(naming.trained) else filled[:1] * len(naming.trained)
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
    # A pipeline stage's optimizer has only its own parameters, and ZeRO 3's has none.
    if pipeline_of(hooks.model) is None and any(group["params"] for group in groups):
        # A strategy that partitions parameters keeps its own tensors in the groups.
        with suppress(KeyError):
            return naming_of(hooks.model, groups)
    names = hooks.get_decay_parameter_names(hooks.model)
    return naming_of(hooks.model, parameter_groups(hooks.model, hooks.args.weight_decay, names))


_HINT = "resilient train --resume {folder} SCRIPT takes it over with the script's own model"


@dataclass(frozen=True, slots=True)
class ImportedFolder:
    """Result of an import.

    Attributes:
        checkpoint: Its name in the repository.
        lost: Losses in words.
    """

    checkpoint: CheckpointId
    lost: tuple[str, ...] = ()


def import_folder(
    folder: str | os.PathLike[str],
    url: str,
    *,
    strict: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> ImportedFolder:
    """Write a Transformers checkpoint to an empty repository as one of ours.

    Transformers must be able to build its model from ``config.json``, with no parameter frozen.
    The optimizer's state is by position, and only the model maps positions to names.

    Args:
        folder: Folder saved by Transformers.
        url: URL of the repository.
        strict: Whether any loss is refused.
        storage_options: Access options; by default those of the environment.

    Raises:
        ConfigError: The repository is in use, or the model cannot be built.
        NothingToResume: The folder holds no checkpoint.
        IntegrityError: The folder is damaged.
        IncompatibleCheckpoint: The optimizer is not of this model, or there is none.
    """
    model = model_from_config(os.fspath(folder))
    naming = naming_of(model, parameter_groups(model, 1.0))
    made = prepare_import(folder, naming, model, strict=strict)
    engine = open_engine(url, storage_options=storage_options)
    try:
        if holds_run(engine):
            raise ConfigError(
                f"the repository `{url}` holds {engine.committed()[0]} already: a run begins once",
                hint=f"resilient ckpt ls {shell_quote(url)}",
            )
        return ImportedFolder(made.commit(engine), made.lost)
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
        NothingToResume: The folder holds no checkpoint.
    """
    found = TransformersCheckpoint(folder)
    hint = _HINT.format(folder=folder)
    if not found.source.has(CONFIG):
        raise ConfigError(f"`{folder}` has no {CONFIG} to build its model from", hint=hint)
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "to build a model from its configuration takes transformers",
            hint="pip install transformers",
        ) from error
    document = found.document(CONFIG)
    name = str((document.get("architectures") or ["none"])[0])
    kind = getattr(transformers, name, None)
    if kind is None or not issubclass(kind, transformers.PreTrainedModel):
        raise ConfigError(f"Transformers has no model `{name}`, of which `{folder}` is", hint=hint)
    config = kind.config_class.from_dict(document)
    with torch.device("meta"):
        model: nn.Module = kind(config)
    return model
