"""A checkpoint of Transformers as the parts of one of ours."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from resilient.errors import IncompatibleCheckpoint
from resilient.format.names import rank_part
from resilient.layouts.agreeing import epoch_of
from resilient.state.capture import Part
from resilient.train.data.drawing import seen_of
from resilient.train.model.papers import DOCUMENTS
from resilient.train.state import TrainerState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from resilient.train.interop.files import TransformersCheckpoint
    from resilient.train.interop.naming import Naming

_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs")
_FLAGS = ("should_training_stop", "should_epoch_stop")
_LIKE_WEIGHT = ("exp_avg", "exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "sum")
"""What an optimizer keeps in the shape of its parameter."""


@dataclass(frozen=True, slots=True)
class RawState:
    """State that is saved as it was given."""

    state: Mapping[str, Any]

    def state_dict(self) -> Mapping[str, Any]:
        """Return it."""
        return self.state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take nothing back: it is only saved."""


@dataclass(frozen=True, slots=True)
class FreshState:
    """State of an optimizer and of a schedule that made no step, where a folder has lost both.

    Attributes:
        optimizer: By name of the parameters.
        scheduler: Of the same groups.
    """

    optimizer: Mapping[str, Any]
    scheduler: Mapping[str, Any]


def parts_of(
    found: TransformersCheckpoint, naming: Naming, best: str, fresh: FreshState | None = None
) -> dict[str, Part]:
    """Return everything that a checkpoint of ours holds, in the order in which it is loaded.

    Args:
        found: what Transformers saved.
        naming: of the model that is to go on.
        best: what this checkpoint will be called here; named as the best if it holds the best.
        fresh: Optimizer and schedule as new, for a folder that lost one of both.

    Raises:
        IncompatibleCheckpoint: it holds no optimizer, or that of another model.
        IntegrityError: a file is damaged, or its files are of several checkpoints.
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
    parts = {name: Part(RawState(one)) for name, one in whole.items()}
    parts |= documents_of(found)
    for rank in range(found.ranks):
        # Each rank finds its own by its name, whoever wrote it.
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
    """Return the optimizer and the schedule; as in Transformers both are new if one is lost.

    Raises:
        IncompatibleCheckpoint: one is lost, and nothing makes new ones.
    """
    if fresh is not None and not found.has_progress:
        return {"optimizer": fresh.optimizer, "scheduler": fresh.scheduler}
    optimizer, kept = named_optimizer(found, naming, weights)
    return {"optimizer": optimizer, "scheduler": _of_groups(found.scheduler(), kept)}


def named_optimizer(
    found: TransformersCheckpoint, naming: Naming, weights: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Any], list[int]]:
    """Return the optimizer's state by name, and which of its groups hold a parameter.

    Raises:
        IncompatibleCheckpoint: it is not of these parameters, or not of these shapes.
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
    state = {names[number]: dict(one) for number, one in plain["state"].items()}
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
    """Return what FSDP or DeepSpeed saved by name; whose groups those are shows at the resume."""
    # A tensor with several names is trained under one of them here, and maybe another there.
    trained = {name for names in naming.trained for name in names}
    ours = {
        name: next((one for one in names if one in trained), name)
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
    state = {ours.get(name, name): dict(one) for name, one in plain["state"].items()}
    _require_fit(found, state, weights)
    places = {
        frozenset(group["params"]): nth for nth, group in enumerate(groups) if group["params"]
    }
    own = [frozenset(names) for names in naming.trained]
    # In the order of this model's groups, as what a schedule keeps by group must be.
    kept = [places[one] for one in own] if set(own) == set(places) else list(places.values())
    return {"state": state, "param_groups": [groups[nth] for nth in kept]}, kept


def _require_fit(
    found: TransformersCheckpoint,
    state: Mapping[str, Mapping[str, Any]],
    weights: Mapping[str, torch.Tensor],
) -> None:
    """Raise if moments have not the shape of their parameter."""
    for name, one in state.items():
        for kind in _LIKE_WEIGHT:
            moment = one.get(kind)
            if moment is None or name not in weights or moment.shape == weights[name].shape:
                continue
            raise IncompatibleCheckpoint(
                f"the moments of `{name}` in `{found.folder}` have the shape "
                f"{tuple(moment.shape)}, and it has {tuple(weights[name].shape)}",
                hint="the model names its parameters in another order than the one that was saved",
            )


def _of_groups(scheduler: Mapping[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """Return a scheduler's state with the numbers of the groups that are there."""
    return {
        name: [value[nth] for nth in kept]
        if name in _BY_GROUP and isinstance(value, list) and len(value) > max(kept, default=-1)
        else value
        for name, value in scheduler.items()
    }


def origin_of(found: TransformersCheckpoint) -> dict[str, Any]:
    """Return which run goes on here, and where in its data it was."""
    return {
        "trainer": "transformers",
        "folder": found.folder.name,
        "digest": found.digest,
        "state_digest": found.state_digest,
        # The import finds its place in the data by the epoch, Transformers by the step.
        "epoch": float(epoch_of(found.state) or 0.0),
        "batch": int(found.state.get("train_batch_size") or 0),
        "ranks": found.ranks,
        **seen_of(found.random_state(0), found.state["log_history"]),
    }


def trainer_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that we know, of which one names a checkpoint without its folder."""
    known = {one.name for one in fields(TrainerState)}
    taken = {name: value for name, value in state.items() if name in known}
    best = taken.get("best_global_step")
    return {**taken, "best_model_checkpoint": f"checkpoint-{best}" if best is not None else None}


def callback_states(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of each callback by name; the second of a class is ``Name_2``."""
    states: dict[str, Any] = {}
    for name, saved in (state.get("stateful_callbacks") or {}).items():
        for nth, one in enumerate(saved if isinstance(saved, list) else [saved], 1):
            taken = dict(one.get("attributes") or {})
            states[name if nth == 1 else f"{name}_{nth}"] = taken
    flags = ((state.get("stateful_callbacks") or {}).get("TrainerControl") or {}).get("args", {})
    control = {name: bool(flags.get(name)) for name in _FLAGS}
    # Transformers clears the flag as it begins to train: a save on SIGTERM has set it.
    control["should_training_stop"] = control["should_training_stop"] and _has_ended(state)
    return {**states, "TrainerControl": control}


def _has_ended(state: Mapping[str, Any]) -> bool:
    """Say whether early stopping ended the run, by the state of its callback."""
    counter, patience = "early_stopping_patience_counter", "early_stopping_patience"
    for saved in (state.get("stateful_callbacks") or {}).values():
        for one in saved if isinstance(saved, list) else [saved]:
            waited = (one.get("attributes") or {}).get(counter)
            if isinstance(waited, int) and waited >= (one.get("args") or {}).get(patience, 1):
                return True
    return False


def _meters(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sums of the losses, as far as they were logged; the others are not recorded."""
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
