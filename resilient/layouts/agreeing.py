"""What the files of one checkpoint of the Trainer say of the same thing, held together (pure).

What its loader does with a contradiction decides what is told: where it goes on from another state
than was saved, a loss; where it takes one of both and is right, the contradiction alone.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from resilient.layouts.documents import decimal, whole
from resilient.layouts.layers import LAYER
from resilient.layouts.values import MODEL, Cure, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from resilient.layouts.values import Optimizer, Schedule, Tensor

_AGREEMENT = "the agreement of its files"
_EPOCHS_APART = 0.02
"""Logs of older versions round the epoch to two digits."""
_RATES_APART = 1e-6
_LAMBDAS = "lr_lambdas"
"""The schedules with it go by what they begin from; others by the rate that a group has."""
_BASES = "the rates that the schedule begins from"
_WIDTHS = (
    *("n_embd", "hidden_size", "d_model", "embedding_size", "word_embed_proj_dim", "n_embed"),
    "dim",
)
_DEPTHS = ("n_layer", "num_hidden_layers", "num_layers")
_EMBEDDINGS = (
    "wte.weight",
    "embed_tokens.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
)
_WRAPPERS = ("module.", "_orig_mod.")
"""Those of DistributedDataParallel and of torch.compile."""
_OTHER_LAYERS = ("num_nextn_predict_layers", "num_decoder_layers", "decoder_layers")
_AXES = 2


def odd_state(place: str, state: Mapping[str, Any]) -> list[Problem]:
    """Return where a state contradicts its own log.

    Args:
        place: its file.
        state: what is in it.
    """
    history = state.get("log_history")
    entries = [one for one in history if isinstance(one, dict)] if isinstance(history, list) else []
    step = whole(state.get("global_step"))
    found = [
        Problem(place, one, cure=Cure.NEEDLESS)
        for one in _in_time(entries, step, decimal(state.get("epoch")))
    ]
    found += _unplaced(place, state, entries)
    best, at = decimal(state.get("best_metric")), whole(state.get("best_global_step"))
    measured = [
        decimal(value)
        for one in entries
        if at is not None and whole(one.get("step")) == at
        for name, value in one.items()
        if isinstance(name, str) and name.startswith("eval_")
    ]
    if best is not None and measured and best not in measured:
        what = (
            f"its best metric is {best:g}, and its log has no such number at its best step, {at}: "
            "what is better from now on is decided by it"
        )
        found.append(Problem(place, what, "the best checkpoint", cure=Cure.COPY))
    return found


def epoch_of(state: Mapping[str, Any]) -> float | None:
    """Return the epoch of a state, from its log where the two contradict; None if nothing says it.

    Transformers counts the place in the data from the step, so a wrong epoch changes no resume of
    its own.

    Args:
        state: content of a ``trainer_state.json``.
    """
    history = state.get("log_history")
    entries = [one for one in history if isinstance(one, dict)] if isinstance(history, list) else []
    step, epoch = whole(state.get("global_step")), decimal(state.get("epoch"))
    if step is None or not any(_in_time(entries, step, epoch)):
        return None if step and epoch is not None and epoch <= 0 else epoch
    logged = {
        at: one
        for entry in entries
        if (at := whole(entry.get("step"))) and (one := decimal(entry.get("epoch"))) and at <= step
    }
    if not logged:
        return epoch
    last = max(logged)
    found = logged[last] * step / last
    # A log that goes on beyond the step contradicts the step, and not the epoch.
    return epoch if epoch is not None and abs(found - epoch) <= _EPOCHS_APART else found


def _unplaced(
    place: str, state: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]
) -> list[Problem]:
    """Return the problem of an epoch 0 after some steps that no log corrects."""
    step, epoch = whole(state.get("global_step")), decimal(state.get("epoch"))
    if not step or epoch is None or epoch > 0 or epoch_of(state) is not None:
        return []
    what = f"its epoch is 0 at step {step}, and its {len(entries)} log entries name no other"
    return [Problem(place, what, "the place in the data", cure=Cure.UNKEPT)]


def _in_time(
    entries: Sequence[Mapping[str, Any]], step: int | None, epoch: float | None
) -> Iterator[str]:
    """Yield a log of the future, and an epoch that is not that of the log."""
    logged = [
        (at, decimal(one.get("epoch")))
        for one in entries
        if (at := whole(one.get("step"))) is not None
    ]
    if step is None or not logged:
        return
    last = max(at for at, _ in logged)
    if last > step:
        yield f"its log goes on to step {last}, beyond its own {step}"
    if epoch is None:
        return
    for at, one in logged:
        is_off = one is not None and (
            one - epoch > _EPOCHS_APART if at < step else abs(one - epoch) > _EPOCHS_APART
        )
        if is_off and at <= step:
            yield f"its epoch is {epoch:g} at step {step}, and its log has {one:g} at step {at}"
            return


def odd_schedule(place: str, value: Mapping[Any, Any]) -> list[Problem]:
    """Return what of a schedule's own state cannot be.

    Args:
        place: its file.
        value: what is in it.
    """
    rates = value.get("base_lrs")
    for one in rates if isinstance(rates, list) else []:
        if isinstance(one, float) and not math.isfinite(one):
            what = f"a rate it begins from is {one}: a step spoils all weights"
            return [Problem(place, what, is_fatal=True, help="resilient ckpt repair {path}")]
    count, last = whole(value.get("_step_count")), value.get("last_epoch")
    step, told = whole(last), value.get("_last_lr")
    if _LAMBDAS in value and isinstance(rates, list) and isinstance(told, list):
        for at, (one, other) in enumerate(zip(rates, told, strict=False)):
            if decimal(one) == 0 and decimal(other):
                what = f"group {at} begins from a rate of 0, and its last one was {other:g}"
                return [Problem(place, f"{what}: it learns nothing more", _BASES, cure=Cure.COPY)]
    if type(last) is int and last < 0 and count:
        what = f"it is at step {last} after {count} calls: its rates would begin anew"
        return [Problem(place, what, "the place in the schedule", cure=Cure.COPY)]
    if count is None or step is None or count == step + 1 or "_schedulers" in value:
        return []
    what = f"it counts {count} calls at step {step}, and each step is one more"
    return [Problem(place, what, cure=Cure.NEEDLESS)]


def odd_count(
    place: str, value: Any, optimizer: Optimizer | None, owner: str = ""
) -> list[Problem]:
    """Return whether a schedule is of another number of groups than its optimizer has.

    Args:
        place: the schedule's file.
        value: what is in it.
        optimizer: its numbers.
        owner: the optimizer's file, if that is another one.
    """
    if optimizer is None or not optimizer.groups or not isinstance(value, dict):
        return []
    bases, last = value.get("base_lrs"), value.get("_last_lr")
    if not isinstance(bases, list):
        what = "it has no `base_lrs`: the rates it begins from would be those of today's arguments"
        return [Problem(place, what, _BASES, cure=Cure.COPY)] if _LAMBDAS in value else []
    count, begun = optimizer.groups, len(bases)
    told = len(last) if isinstance(last, list) else count
    stops = Problem(place, "", is_fatal=True, cure=Cure.COPY)
    if begun == told != count:
        what = f"it has {count} groups, and the schedule rates of {told}: torch stops at that"
        return [replace(stops, place=owner or place, what=what)]
    if begun != count and (_LAMBDAS in value or told != count):
        what = f"it has rates of {begun} groups, and the optimizer has {count}"
        return [replace(stops, what=f"{what}: torch stops at that")]
    what = f"it tells of {begun} and {told} groups, and the optimizer has {count}"
    return [] if begun == told else [Problem(place, what, cure=Cure.NEEDLESS)]


def odd_rates(optimizer: Optimizer | None, schedule: Schedule | None) -> list[Problem]:
    """Return whether the optimizer's rates are others than its schedule set."""
    if optimizer is None or schedule is None or len(optimizer.rates) != len(schedule.rates):
        return []
    for at, (one, other) in enumerate(zip(optimizer.rates, schedule.rates, strict=True)):
        if not math.isclose(one, other, rel_tol=_RATES_APART, abs_tol=1e-30):
            what = (
                f"the learning rate of group {at} is {one:g} in the optimizer and {other:g} in the "
                "schedule: the next step is made with the optimizer's"
            )
            return [Problem(".", what, _AGREEMENT, cure=Cure.COPY)]
    return []


def behind(optimizer: Optimizer | None, step: int | None, *, may_skip: bool) -> list[Problem]:
    """Return whether an optimizer made fewer updates than its training made steps.

    Args:
        optimizer: its numbers.
        step: of the training.
        may_skip: whether updates may have been skipped, as a scaler of fp16 does.
    """
    if optimizer is None or optimizer.step is None or step is None or optimizer.step >= step:
        return []
    if may_skip:
        return []
    what = f"the optimizer made {optimizer.step} updates by step {step}, and no scaler skipped any"
    return [Problem(".", what, _AGREEMENT, cure=Cure.COPY)]


def wrapped(tensors: Sequence[Tensor]) -> tuple[Problem, ...]:
    """Return whether all weights have the name that a wrapper around the model gives them.

    The Trainer of Transformers saves without; it loads what fits, and the rest stays as it was.
    """
    weights = [one for one in tensors if one.part == MODEL]
    for prefix in _WRAPPERS:
        if weights and all(one.name.startswith(prefix) for one in weights):
            what = (
                f"all its weights are named `{prefix}...`, as of a model in a wrapper: a model "
                "without one takes none of them, and the Trainer goes on from weights as new"
            )
            loses = "the weights, unless the model is in that wrapper"
            place = weights[0].files[0] if weights[0].files else "."
            return (Problem(place, what, loses, cure=Cure.EARLIER),)
    return ()


def odd_config(place: str, config: Mapping[str, Any], tensors: Sequence[Tensor]) -> list[Problem]:
    """Return whether a configuration is of another model than the weights.

    A resume takes the model of its script; who loads the folder makes one by its configuration.

    Args:
        place: its file.
        config: what is in it.
        tensors: of the checkpoint.
    """
    held = [one for one in tensors if one.part == MODEL]
    sayings = (*_embedded(config, held), *_layered(config, held))
    after = "`from_pretrained` of this folder would make another model"
    return [Problem(place, f"{one}: {after}") for one in sayings]


def _embedded(config: Mapping[str, Any], tensors: Sequence[Tensor]) -> Iterator[str]:
    one = next((one for one in tensors if one.name.endswith(_EMBEDDINGS)), None)
    if one is None or len(one.shape) != _AXES:
        return
    rows, width = one.shape
    vocabulary = whole(config.get("vocab_size"))
    if vocabulary is not None and vocabulary != rows:
        yield f"its `vocab_size` is {vocabulary}, and `{one.name[:80]}` is {list(one.shape)}"
    widths = {name: said for name in _WIDTHS if (said := whole(config.get(name))) is not None}
    if widths and width not in widths.values():
        name, said = next(iter(widths.items()))
        yield f"its `{name}` is {said}, and `{one.name[:80]}` is {list(one.shape)}"


def _layered(config: Mapping[str, Any], tensors: Sequence[Tensor]) -> Iterator[str]:
    name = next((one for one in _DEPTHS if whole(config.get(one)) is not None), None)
    stacks: dict[str, int] = {}
    for one in tensors:
        if match := LAYER.fullmatch(one.name):
            stack = match["stack"] or ""
            stacks[stack] = max(stacks.get(stack, 0), int(match["number"]) + 1)
    # Of a model with two stacks each has a key of its own.
    if name is None or len(stacks) != 1 or any(config.get(one) for one in _OTHER_LAYERS):
        return
    (count,) = stacks.values()
    if count != config[name]:
        yield f"its `{name}` is {config[name]}, and the weights are of {count} layers"
