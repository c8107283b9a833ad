"""Conversion of a Transformers checkpoint to the parts of a checkpoint of this package.

Transformers saves an optimizer's state by the position of each parameter. The model is needed to
map a position to a parameter name.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from resilient.errors import ConfigError, IncompatibleCheckpoint
from resilient.format.keys import rank_part
from resilient.layouts.best_checkpoint import best_step
from resilient.layouts.consistency import epoch_of
from resilient.layouts.json_files import decimal, whole
from resilient.state_dict.snapshot import Part
from resilient.strategies.module_wrapper import find_redirect, named_in
from resilient.train.data.ordering import seen_of
from resilient.train.hf_interop.checkpoint import DEFAULT_ADAPTER
from resilient.train.model.artifacts import DOCUMENTS, adapters_of, is_adapted
from resilient.train.state import TrainerState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn

    from resilient.train.hf_interop.checkpoint import TransformersCheckpoint

_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs")
_FLAGS = ("should_training_stop", "should_epoch_stop")
_LIKE_WEIGHT = ("exp_avg", "exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "sum")
"""Optimizer state in the shape of its parameter."""


@dataclass(frozen=True, slots=True)
class RawState:
    """Stateful that saves a given state unchanged."""

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
    source: TransformersCheckpoint,
    naming: Naming,
    best: str,
    fresh: FreshState | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, Part]:
    """Return all parts of the native checkpoint, in loading order.

    Args:
        source: Checkpoint saved by Transformers.
        naming: Names of the model that will continue.
        best: Name of the new checkpoint, recorded as the best if it has the best model.
        fresh: Initial optimizer and schedule, for a folder that lost one of them.
        tensors: Weights of the folder, if they were read already.

    Raises:
        IncompatibleCheckpoint: The checkpoint has no optimizer, or the optimizer of another model.
        IntegrityError: A file is damaged, or the folder has files of several checkpoints.
    """
    weights = naming.complete(source.weights() if tensors is None else tensors)
    state = source.state
    is_best = best_step(os.fspath(source.folder), state) == source.step
    scaler = source.scaler()
    state_by_part: dict[str, Mapping[str, Any]] = {
        "model": weights,
        **_progress(source, naming, weights, fresh),
        **({"scaler": scaler} if scaler is not None else {}),
        "data": {"elsewhere": origin_of(source)},
        "callbacks": callback_states(state),
        "best": {"checkpoint": best if is_best else ""},
    }
    parts = {name: Part(RawState(value)) for name, value in state_by_part.items()}
    parts |= documents_of(source)
    for rank in range(source.ranks):
        # Each rank finds its part by name. The rank that wrote the part does not matter.
        parts[rank_part("meters", rank)] = Part(RawState(_meters(state)))
        random = source.random_state(rank)
        if random is not None:
            parts[rank_part("rng_state", rank)] = Part(RawState(random))
    return parts


def documents_of(source: TransformersCheckpoint) -> dict[str, Part]:
    """Return the parts that are JSON files: the trainer's state and the model's configurations."""
    parts = {"trainer_state": Part(RawState(trainer_state(source)), document="trainer_state.json")}
    for name, file in DOCUMENTS.items():
        if source.source.has(file):
            parts[name] = Part(RawState(source.document(file)), document=file)
    return parts


def _progress(
    source: TransformersCheckpoint,
    naming: Naming,
    weights: Mapping[str, torch.Tensor],
    fresh: FreshState | None,
) -> dict[str, Mapping[str, Any]]:
    """Return optimizer and schedule. As in Transformers, both restart if one of them is lost.

    Raises:
        IncompatibleCheckpoint: One of them is lost, and no initial state is given.
    """
    if fresh is not None and not source.has_progress:
        return {"optimizer": fresh.optimizer, "scheduler": fresh.scheduler}
    optimizer, group_numbers = named_optimizer(source, naming, weights)
    scheduler = _keep_groups(source.scheduler(), group_numbers, len(naming.trained))
    return {"optimizer": optimizer, "scheduler": scheduler}


def named_optimizer(
    source: TransformersCheckpoint, naming: Naming, weights: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Any], list[int]]:
    """Return the optimizer's state by name, and the indices of the saved groups in it.

    The groups are those of this model's optimizer. Saved groups without parameters that this
    optimizer does not have are left out, because our Trainer makes none.

    Raises:
        IncompatibleCheckpoint: The optimizer's parameters or shapes differ from the model's.
    """
    plain = source.optimizer()
    if any(isinstance(name, str) for group in plain["param_groups"] for name in group["params"]):
        return _by_name(source, plain, naming, weights)
    counts = [len(group["params"]) for group in plain["param_groups"]]
    own_counts = [len(names) for names in naming.trained]
    group_numbers = _matching_groups(counts, own_counts)
    if group_numbers is None:
        raise IncompatibleCheckpoint(
            f"the optimizer in `{source.folder}` has groups of {counts} parameters, and that of "
            f"this model {own_counts}",
            hint="train the same model, with the same parameters frozen and decayed, and the same "
            "groups",
        )
    groups = [plain["param_groups"][nth] for nth in group_numbers]
    names = {
        number: name
        for group, trained_names in zip(groups, naming.trained, strict=True)
        for number, name in zip(group["params"], trained_names, strict=True)
    }
    state = {names[number]: dict(value) for number, value in plain["state"].items()}
    _require_fit(source, state, weights)
    renamed = [
        {**group, "params": list(trained_names)}
        for group, trained_names in zip(groups, naming.trained, strict=True)
    ]
    return {**plain, "state": state, "param_groups": renamed}, group_numbers


def _matching_groups(saved: Sequence[int], own: Sequence[int]) -> list[int] | None:
    """Return for each own group the saved group of the same size, in order.

    Args:
        saved: Number of parameters in each saved group; groups without any may have no own group.
        own: Number of parameters in each own group.
    """
    group_numbers: list[int] = []
    left = list(enumerate(saved))
    for size in own:
        while left and left[0][1] == 0 != size:
            left.pop(0)
        if not left or left[0][1] != size:
            return None
        group_numbers.append(left.pop(0)[0])
    return None if any(size for _, size in left) else group_numbers


def _by_name(
    source: TransformersCheckpoint,
    plain: Mapping[str, Any],
    naming: Naming,
    weights: Mapping[str, torch.Tensor],
) -> tuple[dict[str, Any], list[int]]:
    """Return the state of FSDP or DeepSpeed by name; the resume checks the groups."""
    # A tensor with several names may be trained under different names in the two trainers.
    trained_names = {name for names in naming.trained for name in names}
    own_name_by_name = {
        name: next((alias for alias in names if alias in trained_names), name)
        for names in naming.tied
        for name in names
    }
    groups = [
        {**group, "params": [own_name_by_name.get(name, name) for name in group["params"]]}
        for group in plain["param_groups"]
    ]
    parameter_names = {name for group in groups for name in group["params"]}
    if parameter_names != trained_names:
        differ = sorted(parameter_names ^ trained_names)
        raise IncompatibleCheckpoint(
            f"the optimizer in `{source.folder}` and that of this model differ in `{differ[0]}` "
            f"and {len(differ) - 1} more parameters",
            hint="train the same model, with the same parameters frozen",
        )
    state = {
        own_name_by_name.get(name, name): dict(value) for name, value in plain["state"].items()
    }
    _require_fit(source, state, weights)
    group_numbers = _numbers_by_name(groups, naming.trained)
    return {"state": state, "param_groups": [groups[nth] for nth in group_numbers]}, group_numbers


def _numbers_by_name(
    groups: Sequence[Mapping[str, Any]], trained: Sequence[Sequence[str]]
) -> list[int]:
    """Return the saved groups of this model's groups, or all if they are grouped differently.

    The order is that of this model's groups, because a schedule has one value per group. Files that
    are sharded by name have no groups without parameters.
    """
    places = {
        frozenset(group["params"]): nth for nth, group in enumerate(groups) if group["params"]
    }
    trained_groups = [frozenset(names) for names in trained]
    if {members for members in trained_groups if members} != set(places):
        return list(places.values())
    empty_numbers = [nth for nth, group in enumerate(groups) if not group["params"]]
    group_numbers: list[int] = []
    for members in trained_groups:
        if members:
            group_numbers.append(places[members])
        elif empty_numbers:
            group_numbers.append(empty_numbers.pop(0))
    return group_numbers


def _require_fit(
    source: TransformersCheckpoint,
    state: Mapping[str, Mapping[str, Any]],
    weights: Mapping[str, torch.Tensor],
) -> None:
    """Raise if a moment does not have the shape of its parameter."""
    for name, value in state.items():
        for kind in _LIKE_WEIGHT:
            moment = value.get(kind)
            if moment is None or name not in weights or moment.shape == weights[name].shape:
                continue
            raise IncompatibleCheckpoint(
                f"the moments of `{name}` in `{source.folder}` have the shape "
                f"{tuple(moment.shape)}, and it has {tuple(weights[name].shape)}",
                hint="the model names its parameters in another order than the one that was saved",
            )


def _keep_groups(scheduler: Mapping[str, Any], kept: Sequence[int], count: int) -> dict[str, Any]:
    """Return a scheduler's state reduced to the kept groups.

    Args:
        scheduler: State of the scheduler.
        kept: Indices of the kept groups.
        count: Number of groups of this model's optimizer.
    """
    is_in_order = list(kept) == sorted(kept)

    def is_kept_whole(values: Sequence[Any]) -> bool:
        return len(values) <= max(kept, default=-1) or (is_in_order and len(values) == count)

    return {
        name: [value[nth] for nth in kept]
        if name in _BY_GROUP and isinstance(value, list) and not is_kept_whole(value)
        else value
        for name, value in scheduler.items()
    }


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return a path from the root, without ``..``; links stay as they are named."""
    return os.path.normpath(Path(path).absolute())


def origin_of(source: TransformersCheckpoint) -> dict[str, Any]:
    """Return the origin of the run and its position in the data."""
    return {
        "trainer": "transformers",
        "folder": source.folder.name,
        "path": absolute_path(source.folder),
        "digest": source.digest,
        "state_digest": source.state_digest,
        # The import locates its position in the data by the epoch, Transformers by the step.
        "epoch": float(epoch_of(source.state) or 0.0),
        "batch": whole(source.state.get("train_batch_size")) or 0,
        "ranks": source.ranks,
        **seen_of(source.random_state(0), source.state["log_history"]),
    }


def trainer_state(source: TransformersCheckpoint) -> dict[str, Any]:
    """Return the known fields, with the best checkpoint's name without its folder."""
    state = source.state
    field_names = {attribute.name for attribute in fields(TrainerState)}
    known_fields = {name: value for name, value in state.items() if name in field_names}
    step = best_step(os.fspath(source.folder), state)
    evaluated = known_fields.get("best_global_step")
    return {
        **known_fields,
        # Another tool may save no epoch; Transformers then counts by the step.
        "epoch": decimal(known_fields.get("epoch")) or epoch_of(state) or 0.0,
        "train_batch_size": whole(known_fields.get("train_batch_size")) or 0,
        # Versions before 4.51 save no step of the best evaluation.
        "best_global_step": step if evaluated is None else evaluated,
        "best_model_checkpoint": f"checkpoint-{step}" if step is not None else None,
    }


def callback_states(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of each callback by name; a second of a class is ``Name_2``."""
    states: dict[str, Any] = {}
    for name, saved_states in (state.get("stateful_callbacks") or {}).items():
        for nth, callback in enumerate(
            saved_states if isinstance(saved_states, list) else [saved_states], 1
        ):
            attributes = dict(callback.get("attributes") or {})
            states[name if nth == 1 else f"{name}_{nth}"] = attributes
    flags = ((state.get("stateful_callbacks") or {}).get("TrainerControl") or {}).get("args") or {}
    control = {name: bool(flags.get(name)) for name in _FLAGS}
    # A save on SIGTERM sets this flag, and Transformers clears it when training starts.
    control["should_training_stop"] = control["should_training_stop"] and _has_ended(state)
    return {**states, "TrainerControl": control}


def _has_ended(state: Mapping[str, Any]) -> bool:
    """Return whether early stopping ended the run, according to the state of its callback."""
    counter, patience = "early_stopping_patience_counter", "early_stopping_patience"
    for saved_states in (state.get("stateful_callbacks") or {}).values():
        for callback in saved_states if isinstance(saved_states, list) else [saved_states]:
            waited = (callback.get("attributes") or {}).get(counter)
            if isinstance(waited, int) and waited >= (callback.get("args") or {}).get(patience, 1):
                return True
    return False


def _meters(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sums of the logged losses, because Transformers records no other losses."""
    summed, steps, last_entry = 0.0, 0, {}
    for entry in state["log_history"]:
        step = whole(entry.get("step"))
        if step is not None and _is_number(entry.get("loss")):
            summed += entry["loss"] * (step - steps)
            steps, last_entry = step, entry
    return {
        "recent": torch.zeros((), dtype=torch.float64),
        "logged": torch.tensor(summed, dtype=torch.float64),
        "grad_norm": torch.tensor(_number_in(last_entry, "grad_norm")),
        "recent_steps": 0,
        "logged_steps": steps,
        "learning_rate": _number_in(last_entry, "learning_rate"),
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number_in(entry: Mapping[str, Any], name: str) -> float:
    """Return a number of a log entry; 0 for any other value, which a script may log."""
    value = entry.get(name)
    return float(value) if value is not None and _is_number(value) else 0.0


@dataclass(frozen=True, slots=True)
class Naming:
    """Parameter names, for a checkpoint that identifies parameters by position.

    Attributes:
        trained: Names of the parameters of each of the optimizer's groups, in its order.
        tied: Names of the same tensor; a weight file contains only one of these names.
        adapters: By adapter: names in its PEFT file -> names in the model; empty without adapters.
        active: Name of the active adapter.
        base: All tensors of an adapted model; PEFT files contain only a few of them.
    """

    trained: tuple[tuple[str, ...], ...]
    tied: tuple[tuple[str, ...], ...]
    adapters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    active: str = ""
    base: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def complete(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of a folder, completed by the base model's tensors."""
        return {**self.base, **self._own(tensors)}

    def missing(self, tensors: Mapping[str, torch.Tensor]) -> tuple[list[str], int]:
        """Return the adapter weights that a folder lacks, and their number if none were missing.

        Expected are all weights of each adapter of which the folder has a weight, and all trained
        weights. Every other weight comes from the base model of the script.

        Args:
            tensors: Tensors of the folder.
        """
        if not self.adapters:
            return [], 0
        own_names = self._own(tensors).keys()
        expected_names = {name for names in self.trained for name in names}
        for names in self.adapters.values():
            if not own_names.isdisjoint(names.values()):
                expected_names |= set(names.values())
        return sorted(expected_names - own_names), len(expected_names)

    def _own(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of a folder by their names in the model, tied tensors by all names.

        As in Transformers, an adapter in the folder itself is the active adapter, or ``default`` if
        subfolders have other adapters.
        """
        if not self.adapters:
            return tie(tensors, self.tied)
        is_alone = not any("/" in key for key in tensors)
        in_root = self.adapters.get(self.active if is_alone else DEFAULT_ADAPTER)
        own_tensors: dict[str, torch.Tensor] = {}
        for key, tensor in tensors.items():
            folder, _, name = key.partition("/")
            names = self.adapters.get(folder) if name else in_root
            own_tensors[(names or {}).get(name or key, key)] = tensor
        return tie(own_tensors, self.tied)


def naming_of(model: nn.Module, groups: Iterable[Mapping[str, Any]]) -> Naming:
    """Return the names of a model's tensors and of an optimizer's parameters.

    Args:
        model: The plain module; it may be on the meta device.
        groups: ``param_groups`` of the optimizer.

    Raises:
        KeyError: A group has a parameter that does not belong to the model.
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
    trained_names: tuple[tuple[str, ...], ...] = (tuple(firsts.values()),)
    is_flat = (
        find_redirect(model) is not None
        and len(parameter_ids) == 1
        and names.keys().isdisjoint(parameter_ids[0])
    )
    if not is_flat:  # In this case flat vectors contain all trained parameters.
        trained_names = tuple(
            tuple(names[number] for number in numbers) for numbers in parameter_ids
        )
    naming = Naming(trained_names, tied_names(model))
    if not is_adapted(model):
        return naming
    if find_redirect(model) is not None:
        raise ConfigError(
            "cannot import an adapter's checkpoint of Transformers with FSDP1, which does not "
            "expose the tensors of the base model",
            hint="import it without fsdp first, or set version=2 in fsdp_config",
        )
    active = adapters_of(model)
    adapters = {name: adapter["names"] for name, adapter in active["others"].items()}
    return replace(
        naming,
        adapters={active["name"]: active["names"], **adapters},
        active=active["name"],
        base=model.state_dict(),
    )


def tied_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the names of each parameter with several names."""
    names_by_id: defaultdict[int, list[str]] = defaultdict(list)
    for parameter in named_in(model):
        names_by_id[parameter.number].append(parameter.name)
    return tuple(tuple(names) for names in names_by_id.values() if len(names) > 1)


def tie(
    tensors: Mapping[str, torch.Tensor], tied: Sequence[Sequence[str]]
) -> dict[str, torch.Tensor]:
    """Return the tensors, with each tied tensor under all of its names."""
    completed_tensors = dict(tensors)
    for names in tied:
        tensor = next((tensors[name] for name in names if name in tensors), None)
        if tensor is not None:
            completed_tensors |= {name: tensor for name in names if name not in tensors}
    return completed_tensors
