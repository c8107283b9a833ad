"""The parts of a checkpoint of ours as Transformers keeps them (pure but torch)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from resilient.errors import IncompatibleCheckpoint
from resilient.train.data.sampling import Deal
from resilient.train.optimizers.groups import is_decayed_name
from resilient.train.plan import steps_after

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# The fields of their state (5.23); they refuse a file with any other.
_STATE = (
    *("best_global_step", "best_metric", "best_model_checkpoint", "epoch", "eval_steps"),
    *("global_step", "is_hyper_param_search", "is_local_process_zero", "is_world_process_zero"),
    *("log_history", "logging_steps", "max_steps", "num_input_tokens_seen", "num_train_epochs"),
    *("save_steps", "stateful_callbacks", "total_flos", "train_batch_size", "trial_name"),
    "trial_params",
)
_CONTROL = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate")
_GROUPS = 2
_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs")


def weights(model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a model; one that has several names under the one that is trained."""
    trained = {name for group in optimizer["param_groups"] for name in group["params"]}
    names: dict[int, str] = {}
    for name, one in model.items():
        if isinstance(one, torch.Tensor) and (id(one) not in names or name in trained):
            names[id(one)] = name
    return {name: model[name] for name in names.values()}


def optimizer_by_position(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state by the position of its parameters, in their two groups.

    Theirs has a group with weight decay and one without, even when one of them is empty.
    """
    groups = with_both(optimizer["param_groups"], optimizer["param_groups"], _empty_like)
    numbers: dict[str, int] = {}
    for group in groups:
        numbers |= {name: len(numbers) + nth for nth, name in enumerate(group["params"])}
    state = {numbers[name]: dict(one) for name, one in optimizer["state"].items()}
    renumbered = [{**one, "params": [numbers[name] for name in one["params"]]} for one in groups]
    ordered = dict(sorted(state.items()))
    return {**optimizer, "state": ordered, "param_groups": renumbered}


def scheduler_by_group(
    scheduler: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a scheduler's state for their two groups."""
    return {
        name: with_both(value, groups, lambda one: one)
        if name in _BY_GROUP and isinstance(value, list) and len(value) == len(groups)
        else value
        for name, value in scheduler.items()
    }


def with_both(values: Sequence[Any], groups: Sequence[Mapping[str, Any]], other: Any) -> list[Any]:
    """Return a value for each of their two groups, where only one of them has parameters."""
    if len(groups) != 1:
        return list(values)
    decayed = groups[0]["weight_decay"] > 0 or any(map(is_decayed_name, groups[0]["params"]))
    both = [values[0], other(values[0])]
    return both if decayed else both[::-1]


def _empty_like(group: Mapping[str, Any]) -> dict[str, Any]:
    return {**group, "params": []}


def random_state(ours: Mapping[str, Any], *, is_alone: bool) -> dict[str, Any]:
    """Return a rank's random state as they keep it."""
    numpy = ours["numpy"]
    theirs = {
        "python": ours["python"],
        "numpy": (
            numpy["bit_generator"],
            numpy["state"]["key"],
            numpy["state"]["pos"],
            numpy["has_gauss"],
            numpy["gauss"],
        ),
        "cpu": ours["cpu"],
    }
    if "cuda" in ours:
        theirs["cuda"] = ours["cuda"][0] if is_alone else list(ours["cuda"])
    return theirs


def trainer_state(
    ours: Mapping[str, Any], callbacks: Mapping[str, Any], best: str | None
) -> dict[str, Any]:
    """Return the content of their ``trainer_state.json``.

    Args:
        ours: our part of that name.
        callbacks: our part ``callbacks``: the control flags, and states by name.
        best: path of the checkpoint with the best model, if it is there.
    """
    flags = callbacks.get("TrainerControl", {})
    control = {"args": {name: bool(flags.get(name)) for name in (*_CONTROL, "should_log")}}
    stateful: dict[str, Any] = {"TrainerControl": {**control, "attributes": {}}}
    for name, state in callbacks.items():
        if name != "TrainerControl":
            said = ours.get("stateful_callbacks", {}).get(name, {})
            stateful[name] = {"args": said.get("args", {}), "attributes": dict(state)}
    kept = {name: ours[name] for name in _STATE if name in ours}
    return {**kept, "stateful_callbacks": stateful, "best_model_checkpoint": best}


def require_their_place(data: Mapping[str, Any], config: Mapping[str, Any], step: int) -> None:
    """Raise unless the step alone says where in the data the run is, as they believe.

    Args:
        data: what the manifest says of the position.
        config: the arguments of the run.
        step: optimizer steps that were made.

    Raises:
        IncompatibleCheckpoint: the batch size or the number of ranks changed in between, or an
            epoch was cut short; or the order of the epoch under way is not theirs.
    """
    if "global_batch" not in data:
        return  # as it was taken over from them
    accumulation = int(config.get("gradient_accumulation_steps", 1))
    each = int(data["global_batch"]) // accumulation
    drops = bool(config.get("dataloader_drop_last"))
    per_epoch = steps_after(Deal(data["dataset_size"], each, 1, drops), 0, accumulation)
    into = steps_after(Deal(data["samples"], each, 1), 0, accumulation)
    if data["epoch"] * per_epoch + into != step:
        raise IncompatibleCheckpoint(
            f"Transformers would go on elsewhere in the data: it counts {per_epoch} steps per "
            f"epoch, so that step {step} is not sample {data['samples']} of epoch {data['epoch']}",
            hint="export a checkpoint from before the batch size, the number of processes or the "
            "length of an epoch changed, or go on here",
        )
    # In the first epoch theirs draws, from the seed, what ours drew if it draws as theirs.
    is_alike = data["epoch"] == 0 and config.get("random_numbers") == "transformers"
    if 0 < data["samples"] < data["dataset_size"] and not is_alike and _groups(config):
        raise IncompatibleCheckpoint(
            "Transformers draws the order of the epoch anew when it goes on with samples that are "
            f"grouped by length: in the middle of epoch {data['epoch']} it would leave some out "
            "and repeat others",
            hint="export a checkpoint from the end of an epoch, or go on here",
        )


def _groups(config: Mapping[str, Any]) -> bool:
    return config.get("train_sampling_strategy") == "group_by_length"
