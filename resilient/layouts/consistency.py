"""Checks that the files of one checkpoint do not contradict each other.

A contradiction counts as a loss if the tool would continue from a state that was never saved. It is
only a note if the tool uses the correct value anyway.

Source: ``torch.optim.Optimizer.load_state_dict``. This method raises an error if the number of
groups differs, and loads all other content unchecked. torch also compares no shapes at a load, so
wrong shapes raise an error only at the first step.

Layers of one model usually have the same tensor names. The module therefore also reports a tensor
that has another name in one layer than in all other layers.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from resilient.layouts.best_checkpoint import measured_at
from resilient.layouts.field_types import option_faults, unused_slots
from resilient.layouts.json_files import decimal, whole
from resilient.layouts.model import ADAM_ALONE, MODEL, OPTIMIZER, Problem, Remedy
from resilient.layouts.pickle_reader import TensorRef
from resilient.layouts.weights import SAFE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from resilient.layouts.model import Optimizer, Schedule, Tensor
    from resilient.layouts.torch_zip import Archive

LAYER = re.compile(r"(?:(?P<stack>.*?)\.)?(?:h|layers?|blocks?)\.(?P<number>\d{1,6})\.(?P<own>.*)")
_LAYERS_MIN = 3
"""Minimum number of layers for this check, because two layers may be of different kinds."""
LOSES = "a weight of a layer"


def check_layer_names(tensors: Sequence[Tensor]) -> list[Problem]:
    """Return weights that one layer has in place of a weight that all other layers have.

    Transformers loads such a file, and initializes the missing weight again. Our import and the
    strict loads of other tools refuse such a file.

    Args:
        tensors: Tensors of the whole checkpoint.
    """
    stacks: dict[str, dict[int, dict[str, Tensor]]] = {}
    for tensor in tensors:
        match = LAYER.fullmatch(tensor.name) if tensor.part == MODEL else None
        if match:
            layers = stacks.setdefault(match["stack"] or "", {})
            layers.setdefault(int(match["number"]), {})[match["own"]] = tensor
    return [problem for layers in stacks.values() for problem in _odd(layers)]


def _odd(layers: Mapping[int, Mapping[str, Tensor]]) -> Iterator[Problem]:
    counts = Counter(name for layer in layers.values() for name in layer)
    common_names = {name for name, count in counts.items() if count == len(layers) - 1}
    shapes = {name: value.shape for layer in layers.values() for name, value in layer.items()}
    for layer in layers.values():
        missing_names, unique_names = (
            common_names - layer.keys(),
            [name for name in layer if counts[name] == 1],
        )
        if len(missing_names) != 1 or len(unique_names) != 1:
            continue
        (lacking_name,), (odd_name,) = missing_names, unique_names
        layer_tensor, is_pair = layer[odd_name], len(layers) < _LAYERS_MIN
        if layer_tensor.shape != shapes[lacking_name] or (
            is_pair and not _is_bit_apart(lacking_name, odd_name)
        ):
            continue
        problem_text = (
            f"`{layer_tensor.name[:80]}` is in no other layer, and `{lacking_name[:80]}` of "
            f"{'the other' if is_pair else 'all others'} is not in this one: one of both names is "
            "wrong, and the weight would start again"
        )
        yield Problem(
            layer_tensor.files[0] if layer_tensor.files else ".",
            problem_text,
            LOSES,
            cure=Remedy.COPY,
        )
        if is_pair:
            return  # avoid a second report for the same pair


def _is_bit_apart(left: str, right: str) -> bool:
    first, second = left.encode(), right.encode()
    flips = int.from_bytes(first) ^ int.from_bytes(second)
    return len(first) == len(second) and flips.bit_count() == 1


_AGREEMENT = "the consistency of its files"
_EPOCHS_APART = 0.02
"""Logs of older versions round the epoch to two digits."""
_RATES_APART = 1e-6
_LAMBDAS = "lr_lambdas"
"""Schedulers with this key use base rates. Others use the current rate of a group."""
_BASES = "the initial rates of the schedule"
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
"""Name prefixes of DistributedDataParallel and torch.compile."""
_WRAPPER_MODULES = {"_orig_mod": False, "module": True}
"""Modules of wrappers, from the outside in, and whether a model may have such a child itself."""
_OTHER_LAYERS = ("num_nextn_predict_layers", "num_decoder_layers", "decoder_layers")
_AXES = 2


def check_trainer_state(place: str, state: Mapping[str, Any]) -> list[Problem]:
    """Return contradictions between a Trainer's state and its own log.

    Args:
        place: File of the state.
        state: Content of the file.
    """
    history = state.get("log_history")
    entries = (
        [entry for entry in history if isinstance(entry, dict)] if isinstance(history, list) else []
    )
    step = whole(state.get("global_step"))
    problems = [
        Problem(place, problem, cure=Remedy.NEEDLESS)
        for problem in _log_contradictions(entries, step, decimal(state.get("epoch")))
    ]
    problems += _epoch_problem(place, state, entries)
    epoch = state.get("epoch")
    if not problems and epoch is not None and decimal(epoch) is None:
        problem_text = "its epoch is not a number, and the epoch of its log is used"
        problems.append(Problem(place, problem_text, cure=Remedy.NEEDLESS))
    best, at = decimal(state.get("best_metric")), whole(state.get("best_global_step"))
    measured = measured_at(state, at)
    if best is not None and measured and best not in measured:
        problem_text = (
            f"its best metric is {best:g}, but its log has no such number at its best step, {at}: "
            "later evaluations are compared with this metric"
        )
        problems.append(Problem(place, problem_text, "the best checkpoint", cure=Remedy.COPY))
    return problems


def epoch_of(state: Mapping[str, Any]) -> float | None:
    """Return the epoch of a state, or of its log if both differ; None if unknown.

    Transformers computes the position in the data from the step, so a wrong epoch does not affect
    its own resume.

    Args:
        state: Content of a ``trainer_state.json``.
    """
    history = state.get("log_history")
    entries = (
        [entry for entry in history if isinstance(entry, dict)] if isinstance(history, list) else []
    )
    step, epoch = whole(state.get("global_step")), decimal(state.get("epoch"))
    if step is None or (epoch is not None and not any(_log_contradictions(entries, step, epoch))):
        return None if step and epoch is not None and epoch <= 0 else epoch
    logged = {
        at: item
        for entry in entries
        if (at := whole(entry.get("step"))) and (item := decimal(entry.get("epoch"))) and at <= step
    }
    if not logged:
        return epoch
    last = max(logged)
    epoch_by_log = logged[last] * step / last
    # A log that continues beyond the step contradicts the step but not the epoch.
    return (
        epoch if epoch is not None and abs(epoch_by_log - epoch) <= _EPOCHS_APART else epoch_by_log
    )


def _epoch_problem(
    place: str, state: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]
) -> list[Problem]:
    """Return the problem of a missing or zero epoch after some steps, if no log has the epoch."""
    step, epoch = whole(state.get("global_step")), decimal(state.get("epoch"))
    if not step or epoch_of(state) is not None:
        return []
    fault = "it has no epoch" if epoch is None else "its epoch is 0"
    problem_text = f"{fault} at step {step}, and its {len(entries)} log entries name no other"
    return [Problem(place, problem_text, "the place in the data", cure=Remedy.UNKEPT)]


def _log_contradictions(
    entries: Sequence[Mapping[str, Any]], step: int | None, epoch: float | None
) -> Iterator[str]:
    """Yield problems of log entries beyond the step, and of an epoch that the log contradicts."""
    logged = [
        (at, decimal(entry.get("epoch")))
        for entry in entries
        if (at := whole(entry.get("step"))) is not None
    ]
    if step is None or not logged:
        return
    last = max(at for at, _ in logged)
    if last > step:
        yield f"its log continues to step {last}, beyond its own {step}"
    if epoch is None:
        return
    for at, item in logged:
        is_off = item is not None and (
            item - epoch > _EPOCHS_APART if at < step else abs(item - epoch) > _EPOCHS_APART
        )
        if is_off and at <= step:
            yield f"its epoch is {epoch:g} at step {step}, and its log has {item:g} at step {at}"
            return


def check_scheduler(place: str, value: Mapping[Any, Any]) -> list[Problem]:
    """Return impossible values in a scheduler's own state.

    Args:
        place: File of the scheduler.
        value: Content of the file.
    """
    rates = value.get("base_lrs")
    for rate in rates if isinstance(rates, list) else []:
        if isinstance(rate, float) and not math.isfinite(rate):
            problem_text = f"an initial rate is {rate}: a step spoils all weights"
            return [
                Problem(place, problem_text, is_fatal=True, help="resilient ckpt repair {path}")
            ]
    count, last = whole(value.get("_step_count")), value.get("last_epoch")
    step = whole(last)
    if type(last) is int and last < 0 and count:
        problem_text = f"it is at step {last} after {count} calls: its rates would start again"
        return [Problem(place, problem_text, "the place in the schedule", cure=Remedy.COPY)]
    if isinstance(last, float) and not last.is_integer() and _LAMBDAS in value:
        problem_text = f"it is at step {last:g}, but it counts whole calls"
        return [Problem(place, problem_text, is_fatal=True, cure=Remedy.COPY)]
    # A class with its own `step()`, such as CosineAnnealingWarmRestarts, may not count its calls.
    is_uncounted = count in (0, 1) or "_schedulers" in value
    if count is None or step is None or count == step + 1 or is_uncounted:
        return []
    problem_text = f"it counts {count} calls at step {step}, but each step adds one"
    return [Problem(place, problem_text, cure=Remedy.NEEDLESS)]


def _without_rate(place: str, group: int, evidence: str) -> Problem:
    """Return the problem of a group whose rate would stay 0 from the next step on."""
    problem_text = f"group {group} starts from a rate of 0, but {evidence}: it learns nothing more"
    return Problem(place, problem_text, is_fatal=True, cure=Remedy.COPY)


def check_base_rates(
    place: str, value: Any, optimizer: Optimizer | None, planned: float | None = None
) -> list[Problem]:
    """Return the problem of a scheduler whose base rates differ from those of its optimizer.

    torch copies ``initial_lr`` of each group to ``base_lrs`` when it makes a scheduler. A script
    may set other base rates later. A base rate of 0 stops the training of its group. It counts as
    damage if the last rate, the optimizer or the run's arguments show another rate.

    Args:
        place: File of the scheduler.
        value: Content of the file.
        optimizer: Summary of the optimizer.
        planned: ``learning_rate`` of the run's arguments, if known.
    """
    rates = _numbers(value, "base_lrs") if isinstance(value, dict) and _LAMBDAS in value else []
    last_rates = _numbers(value, "_last_lr") if rates else []
    options = optimizer.options if optimizer and len(optimizer.options) == len(rates) else ()
    initial_rates = [decimal(group.get("initial_lr")) for group in options]
    for at, rate in enumerate(rates):
        last_rate = last_rates[at] if at < len(last_rates) else None
        initial_rate = initial_rates[at] if initial_rates else None
        if rate == 0 and last_rate:
            return [_without_rate(place, at, f"its last rate was {last_rate:g}")]
        if rate == 0 and initial_rate:
            evidence = f"its initial rate in the optimizer is {initial_rate:g}"
            return [_without_rate(place, at, evidence)]
        if rate and initial_rate and not math.isclose(rate, initial_rate, rel_tol=_RATES_APART):
            problem_text = (
                f"group {at} starts from a rate of {rate:g}, but its initial rate in the optimizer "
                f"is {initial_rate:g}: the next step computes its rate from {rate:g}"
            )
            return [Problem(place, problem_text, cure=Remedy.COPY)]
    if rates and planned and all(rate == 0 for rate in rates):
        return [_without_rate(place, 0, f"the `learning_rate` of its run is {planned:g}")]
    return []


def _numbers(value: Mapping[Any, Any], name: str) -> list[float | None]:
    rates = value.get(name)
    return [decimal(rate) for rate in rates] if isinstance(rates, list) else []


def check_update_count(
    place: str, value: Any, optimizer: Optimizer | None, owner: str = ""
) -> list[Problem]:
    """Return the problem if a scheduler and its optimizer have different numbers of groups.

    Args:
        place: File of the scheduler.
        value: Content of the file.
        optimizer: Summary of the optimizer.
        owner: File of the optimizer, if it is another file.
    """
    if optimizer is None or not optimizer.groups or not isinstance(value, dict):
        return []
    bases, last = value.get("base_lrs"), value.get("_last_lr")
    if not isinstance(bases, list):
        problem_text = (
            "it has no `base_lrs`: the initial rates would be those of the current arguments"
        )
        return [Problem(place, problem_text, _BASES, cure=Remedy.COPY)] if _LAMBDAS in value else []
    count, initial_count = optimizer.groups, len(bases)
    groups = len(last) if isinstance(last, list) else count
    stops = Problem(place, "", is_fatal=True, cure=Remedy.COPY)
    if initial_count == groups != count:
        problem_text = (
            f"it has {count} groups, but the schedule has rates of {groups}: torch fails at that"
        )
        return [replace(stops, place=owner or place, what=problem_text)]
    if initial_count != count and (_LAMBDAS in value or groups != count):
        problem_text = f"it has rates of {initial_count} groups, but the optimizer has {count}"
        return [replace(stops, what=f"{problem_text}: torch fails at that")]
    problem_text = (
        f"it has {initial_count} initial rates and {groups} last rates, but the optimizer has "
        f"{count} groups"
    )
    return [] if initial_count == groups else [Problem(place, problem_text, cure=Remedy.NEEDLESS)]


def check_learning_rates(optimizer: Optimizer | None, schedule: Schedule | None) -> list[Problem]:
    """Return the problem of optimizer rates that differ from the scheduler's rates."""
    if optimizer is None or schedule is None or len(optimizer.rates) != len(schedule.rates):
        return []
    for at, (optimizer_rate, schedule_rate) in enumerate(
        zip(optimizer.rates, schedule.rates, strict=True)
    ):
        if not math.isclose(optimizer_rate, schedule_rate, rel_tol=_RATES_APART, abs_tol=1e-30):
            problem_text = (
                f"the learning rate of group {at} is {optimizer_rate:g} in the optimizer and "
                f"{schedule_rate:g} in the schedule: the next step uses the optimizer's rate"
            )
            return [Problem(".", problem_text, _AGREEMENT, cure=Remedy.COPY)]
    return []


def behind(optimizer: Optimizer | None, step: int | None, *, may_skip: bool) -> list[Problem]:
    """Return the problem of an optimizer with fewer updates than training steps.

    Args:
        optimizer: Summary of the optimizer.
        step: Step of the training.
        may_skip: Whether updates may have been skipped, as a scaler of fp16 does.
    """
    if optimizer is None or optimizer.step is None or step is None or optimizer.step >= step:
        return []
    if may_skip:
        return []
    problem_text = (
        f"the optimizer made {optimizer.step} updates by step {step}, and no scaler skipped any"
    )
    return [Problem(".", problem_text, _AGREEMENT, cure=Remedy.COPY)]


def wrapped(tensors: Sequence[Tensor]) -> tuple[Problem, ...]:
    """Return the problem if all weights have the name prefix of a wrapper.

    The Trainer of Transformers saves weights without the prefix. At a load it ignores other names,
    and these weights keep their initial values.
    """
    weights = [tensor for tensor in tensors if tensor.part == MODEL]
    for prefix in _WRAPPERS:
        if weights and all(weight.name.startswith(prefix) for weight in weights):
            problem_text = (
                f"all its weights are named `{prefix}...`, as of a model in a wrapper: a model "
                "without the wrapper loads none of them, and the Trainer continues from new "
                "weights"
            )
            loses = "the weights, unless the model is in that wrapper"
            place = weights[0].files[0] if weights[0].files else "."
            return (Problem(place, problem_text, loses, cure=Remedy.EARLIER),)
    return ()


def check_wrapper_names(tensors: Sequence[Tensor]) -> list[Problem]:
    """Return the problem of weights of which only some have the name prefix of a wrapper.

    Transformers ignores the other names at a load, and these weights keep their initial values.

    Args:
        tensors: Tensors of one model.
    """
    weights = {tensor.name: tensor for tensor in tensors if tensor.part == MODEL}
    renamed = unwrapped_names(list(weights))
    if not renamed:
        return []
    first, right_name = next(iter(renamed.items()))
    problem_text = (
        f"`{first[:80]}` has the prefix of a wrapper, but {len(weights) - len(renamed)} of its "
        f"{len(weights)} weights have none: a model has `{right_name[:80]}`, which would start "
        "again with new numbers"
    )
    files = {file for name in renamed for file in weights[name].files}
    is_repairable = bool(files) and all(file.endswith(SAFE) for file in files)
    return [
        Problem(
            _place(weights[first]),
            problem_text,
            f"{len(renamed)} of {len(weights)} weights",
            cure=Remedy.REPAIR if is_repairable else Remedy.COPY,
        )
    ]


def unwrapped_names(names: Sequence[str]) -> dict[str, str]:
    """Return names with the prefix of a wrapper, each with its own name; empty without a mix.

    A module of ``torch.compile`` has only one child. A model may have a child ``module``, so this
    prefix counts only if other names begin like the names behind it. No two names may become equal.

    Args:
        names: Names of all weights of one model.
    """
    own = {name: name for name in names}
    for wrapper, is_ambiguous in _WRAPPER_MODULES.items():
        mixed = _mixed_places(list(own.values()), wrapper, is_ambiguous=is_ambiguous)
        own = {name: _without_wrapper(value, wrapper, mixed) for name, value in own.items()}
    renamed = {name: value for name, value in own.items() if name != value}
    return renamed if len(set(own.values())) == len(own) else {}


def _mixed_places(names: Sequence[str], wrapper: str, *, is_ambiguous: bool) -> set[str]:
    """Return the modules, as prefixes of names, that have a wrapper and another child."""
    inner: dict[str, set[str]] = {}
    for name in names:
        head, is_wrapped, rest = _split_at(name, wrapper)
        if is_wrapped and not (is_ambiguous and head):
            inner.setdefault(head, set()).add(rest.partition(".")[0])
    mixed = set()
    for head, inner_children in inner.items():
        children = {
            name[len(head) :].partition(".")[0] for name in names if name.startswith(head)
        } - {wrapper}
        if children & inner_children if is_ambiguous else children:
            mixed.add(head)
    return mixed


def _without_wrapper(name: str, wrapper: str, places: set[str]) -> str:
    head, is_wrapped, rest = _split_at(name, wrapper)
    return head + rest if is_wrapped and head in places else name


def _split_at(name: str, wrapper: str) -> tuple[str, bool, str]:
    """Return the part of a name before a wrapper, whether it has the wrapper, and the rest."""
    parts = name.split(".")
    if wrapper not in parts[:-1]:
        return "", False, name
    at = parts.index(wrapper)
    return "".join(f"{part}." for part in parts[:at]), True, ".".join(parts[at + 1 :])


def check_model_config(
    place: str, config: Mapping[str, Any], tensors: Sequence[Tensor]
) -> list[Problem]:
    """Return the problem of a configuration that does not fit the weights.

    A resume uses the model of the script, but ``from_pretrained`` creates a model from the
    configuration.

    Args:
        place: File of the configuration.
        config: Content of the file.
        tensors: Tensors of the checkpoint.
    """
    model_tensors = [tensor for tensor in tensors if tensor.part == MODEL]
    messages = (*_embedded(config, model_tensors), *_layered(config, model_tensors))
    consequence = "`from_pretrained` of this folder would create another model"
    return [Problem(place, f"{message}: {consequence}") for message in messages]


def _embedded(config: Mapping[str, Any], tensors: Sequence[Tensor]) -> Iterator[str]:
    tensor = next((tensor for tensor in tensors if tensor.name.endswith(_EMBEDDINGS)), None)
    if tensor is None or len(tensor.shape) != _AXES:
        return
    rows, width = tensor.shape
    vocabulary = whole(config.get("vocab_size"))
    if vocabulary is not None and vocabulary != rows:
        yield f"its `vocab_size` is {vocabulary}, and `{tensor.name[:80]}` is {list(tensor.shape)}"
    widths = {
        name: stated_width
        for name in _WIDTHS
        if (stated_width := whole(config.get(name))) is not None
    }
    if widths and width not in widths.values():
        name, stated_width = next(iter(widths.items()))
        yield f"its `{name}` is {stated_width}, and `{tensor.name[:80]}` is {list(tensor.shape)}"


def _layered(config: Mapping[str, Any], tensors: Sequence[Tensor]) -> Iterator[str]:
    name = next((depth for depth in _DEPTHS if whole(config.get(depth)) is not None), None)
    stacks: dict[str, int] = {}
    for tensor in tensors:
        if match := LAYER.fullmatch(tensor.name):
            stack = match["stack"] or ""
            stacks[stack] = max(stacks.get(stack, 0), int(match["number"]) + 1)
    # A model with two stacks of layers has one key per stack.
    if name is None or len(stacks) != 1 or any(config.get(layer) for layer in _OTHER_LAYERS):
        return
    (count,) = stacks.values()
    if count != config[name]:
        yield f"its `{name}` is {config[name]}, and the weights are of {count} layers"


UNLESS_UNUSED = "unless these parameters never had a gradient, their moments start again"
"""Last words of the problem of a partial state, which another step may clear."""
_EMPTIED = "it has no state of any parameter: the collected moments start again"
_REPAIR = "resilient ckpt repair {path}"
_SCALARS = (
    *("lr", "initial_lr", "betas", "eps", "weight_decay", "momentum", "dampening", "alpha"),
    *("lr_decay", "rho", "lambd"),
)
"""Options that make every weight NaN if they are not finite. Other options may be infinite."""
_OPTIONS = set(_SCALARS) - {"initial_lr"}
_OF_ADAM = {"betas", "eps", "weight_decay"}
_STATE_OF_ADAM = ("step", "exp_avg", "exp_avg_sq")
"""Keys that the first step of Adam needs in each state that is not empty."""
_LARGEST = "max_exp_avg_sq"
"""Key that Adam needs, too, with ``amsgrad``."""
_KEPT_OF_EACH = {
    *("exp_avg", "exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "sum", "acc_delta"),
    *("prev", "state1", "exp_avg_sq_row"),
}
"""Names of state that exists for every parameter with a gradient."""
_GROUPS_MAX = 4096


def check_param_groups(place: str, value: Any, archive: Archive) -> list[Problem]:
    """Return problems in ``{state, param_groups}`` that prevent an exact resume.

    Args:
        place: File of the optimizer.
        value: Content of the file.
        archive: Archive that reads its numbers.

    Raises:
        StoreError: A file could not be read.
    """
    groups, state = value["param_groups"], value["state"]
    if not groups or not all(isinstance(group, dict) for group in groups):
        return [_fatal(place, "it has no parameter groups, and its tool fails without them")]
    messages = (
        *_missing_options(groups[:_GROUPS_MAX], state),
        *_foreign_states(groups, state),
        *_unmatched_states(groups, state),
        *_not_finite(groups[:_GROUPS_MAX], archive),
        *option_faults(groups[:_GROUPS_MAX], state),
    )
    unused = unused_slots(groups[:_GROUPS_MAX], state)
    return [
        *(_fatal(place, message) for message in messages),
        *(Problem(place, message, cure=Remedy.COPY) for message in unused),
    ]


def check_optimizer(
    place: str, value: Any, archive: Archive, *, is_begun: bool = True
) -> list[Problem]:
    """Return problems in ``{state, param_groups}``, including an empty state.

    Args:
        place: File of the optimizer.
        value: Content of the file.
        archive: Archive that reads its numbers.
        is_begun: Whether the training has made steps; before the first step the state is empty.

    Raises:
        StoreError: A file could not be read.
    """
    problems = check_param_groups(place, value, archive)
    if is_begun and _is_emptied(value, archive):
        problems.append(Problem(place, _EMPTIED, "the optimizer's state", cure=Remedy.COPY))
    return [*problems, *_partial_state_problem(place, value)]


def _partial_state_problem(place: str, value: Any) -> list[Problem]:
    """Return the problem of a state for only some of the parameters."""
    states = [held_state for held_state in value["state"].values() if isinstance(held_state, dict)]
    members = (group.get("params") for group in value["param_groups"] if isinstance(group, dict))
    count = sum(len(group) for group in members if isinstance(group, list | tuple))
    if not 0 < len(states) < count or not _KEPT_OF_EACH.intersection(*states[:1]):
        return []
    missing_count = count - len(states)
    problem_text = f"it has no state of {missing_count} of its {count} parameters: {UNLESS_UNUSED}"
    loses = f"the optimizer's state of {missing_count} parameter{'s' * (missing_count > 1)}"
    return [Problem(place, problem_text, loses, cure=Remedy.COPY)]


def _is_emptied(value: Any, archive: Archive) -> bool:
    """Return True if an optimizer that stores state per parameter has no state."""
    first: Any = next(iter(value["param_groups"]), {})
    if value["state"] or not isinstance(first, dict):
        return False
    return "betas" in first or bool(archive.number(first.get("momentum")))


def _unmatched_states(groups: list[dict[Any, Any]], state: dict[Any, Any]) -> Iterator[str]:
    """Yield problems of a parameter that occurs twice, and of a state without a parameter."""
    parameters = [
        parameter
        for group in groups
        if isinstance(members := group.get("params"), list | tuple)
        for parameter in members
        if isinstance(parameter, int | str)
    ]
    known_parameters = set(parameters)
    if len(known_parameters) != len(parameters):
        twice = Counter(parameters).most_common(1)[0][0]
        yield (
            f"parameter `{str(twice)[:80]}` is twice in its groups: another parameter continues "
            "without state"
        )
    elif known_parameters == set(range(len(known_parameters))) and parameters != sorted(
        parameters, key=int
    ):
        yield (
            "the numbers of its parameters are not in order: torch would assign them to other "
            "parameters"
        )
    orphan_keys = [
        key
        for key, members in state.items()
        if isinstance(members, dict) and key not in known_parameters
    ]
    if known_parameters and orphan_keys:
        yield (
            f"the state of `{str(orphan_keys[0])[:80]}` belongs to no parameter in its groups: its "
            "owner continues without state"
        )


def _missing_options(groups: list[dict[Any, Any]], state: dict[Any, Any]) -> Iterator[str]:
    """Yield the problem of the first option that a group lacks and torch does not default."""
    keys = [{key for key in group if isinstance(key, str)} for group in groups]
    is_adam = any(isinstance(value, dict) and "exp_avg_sq" in value for value in state.values())
    for at, group_keys in enumerate(keys):
        absent_fields = {"lr"} | (_OF_ADAM if is_adam and ADAM_ALONE <= group_keys else set())
        for other_keys in keys:
            # Groups of different optimizers lack options of each other, so that is no damage.
            absent_fields |= (other_keys & _OPTIONS) if group_keys < other_keys else set()
        if missing_keys := sorted(absent_fields - group_keys):
            yield f"its group {at} has no `{missing_keys[0]}`: the first step fails at that"
            return


def _foreign_states(groups: list[dict[Any, Any]], state: dict[Any, Any]) -> Iterator[str]:
    """Yield the problem of the first state that lacks a key that torch's Adam needs."""
    if not all(_OF_ADAM | ADAM_ALONE <= group.keys() for group in groups):
        return
    largest = [
        parameter
        for group in groups
        if group.get("amsgrad") is True and isinstance(group.get("params"), list | tuple)
        for parameter in group["params"]
    ]
    for key, moments in state.items():
        needed = (*_STATE_OF_ADAM, _LARGEST) if key in largest else _STATE_OF_ADAM
        missing_names = (
            [name for name in needed if name not in moments] if _is_full(moments) else []
        )
        if missing_names:
            yield (
                f"its groups are of Adam, but the state of `{str(key)[:80]}` has no "
                f"`{missing_names[0]}`: the first step fails at that"
            )
            return


def _is_full(moments: Any) -> bool:
    return isinstance(moments, dict) and bool(moments)


def _not_finite(groups: list[dict[Any, Any]], archive: Archive) -> Iterator[str]:
    for at, group in enumerate(groups):
        for name in _SCALARS:
            option = group.get(name)
            for value in option if isinstance(option, list | tuple) else (option,):
                number = archive.number(value) if isinstance(value, TensorRef | float) else None
                if number is not None and not math.isfinite(number):
                    yield f"`{name}` of its group {at} is {number}: a step spoils all weights"
                    return


def _fatal(place: str, problem_text: str) -> Problem:
    return Problem(place, problem_text, is_fatal=True, help=_REPAIR)


_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Optimizer state in the shape of its parameter."""
_PAIR = {"exp_avg", "exp_avg_sq"}
_FLAT = "rank "
"""Name prefix of tensors that are split over ranks, whose shapes have no meaning."""
_OWNER = re.compile(r"(?P<of>.*?)(?:^|(?<=\.))state\.(?P<name>.+)")
_ANOTHER = "the optimizer belongs to another model"
_Shape = tuple[int, ...]


def check_optimizer_fits(
    tensors: Sequence[Tensor], *, is_lenient: bool = False, is_hurt: bool = False
) -> tuple[Problem, ...]:
    """Return problems of an optimizer that does not fit the weights, or is incomplete.

    Args:
        tensors: Tensors of the whole checkpoint.
        is_lenient: Whether the checkpoint is an adapter, so that a resume takes other weights from
            the base model.
        is_hurt: Whether some files are already known to be broken, and their content is not
            reported again.
    """
    weights = [tensor for tensor in tensors if tensor.part == MODEL]
    moments = [
        tensor
        for tensor in tensors
        if tensor.part == OPTIMIZER
        and tensor.name.endswith(_MOMENTS)
        and not tensor.name.startswith(_FLAT)
    ]
    if not weights:
        return tuple(_missing_moments(moments))
    problems = [
        *_unequal_moments(moments),
        *_moments_without_weight(weights, moments, is_lenient=is_lenient),
    ]
    # An unreadable file of weights was already reported.
    problems = [problem for problem in problems if not (is_hurt and problem.loses)]
    return (*problems[:1], *_missing_moments(moments))


def _unequal_moments(moments: Sequence[Tensor]) -> Iterator[Problem]:
    """Yield problems of parameters whose moments have different shapes."""
    first: dict[str, Tensor] = {}
    for moment in moments:
        owner, _, slot = moment.name.rpartition(".")
        first_moment = first.setdefault(owner, moment)
        if first_moment.shape != moment.shape:
            problem_text = (
                f"`{owner[:80]}` has `{first_moment.name.rpartition('.')[2]}` of the shape "
                f"{list(first_moment.shape)} and `{slot}` of {list(moment.shape)}: the first step "
                "fails"
            )
            yield Problem(_place(moment), problem_text, is_fatal=True)


def _moments_without_weight(
    weights: Sequence[Tensor], moments: Sequence[Tensor], *, is_lenient: bool
) -> Iterator[Problem]:
    """Yield problems of moments that match no weight, and of too many moments."""
    shape_by_name = {weight.name.removeprefix("model."): weight.shape for weight in weights}
    owners: dict[tuple[str, str], dict[str, Tensor]] = {}
    for moment in moments:
        match = _OWNER.fullmatch(moment.name.rpartition(".")[0])
        if match:
            owners.setdefault((_place_of(moment), match["of"]), {})[match["name"]] = moment
    for of_one in owners.values():
        for name, value in of_one.items():
            shape = shape_by_name.get(name.removeprefix("model."), value.shape)
            if shape != value.shape:
                problem_text = (
                    f"`{value.name[:80]}` has the shape {list(value.shape)}, but its weight has "
                    f"{list(shape)}"
                )
                yield Problem(_place(value), f"{problem_text}: {_ANOTHER}", is_fatal=True)
        counts = Counter(weight.shape for weight in weights)
        shapes = Counter(value.shape for value in of_one.values())
        if unmatched_tensors := [
            value for value in of_one.values() if shapes[value.shape] > counts[value.shape]
        ]:
            # A position does not identify the weight of a moment.
            yield (
                _surplus_moments(counts, shapes, unmatched_tensors[0])
                if counts - shapes
                else _lost_weights_problem(
                    weights, shapes, unmatched_tensors[0], is_lenient=is_lenient
                )
            )


def _surplus_moments(weights: Counter[_Shape], shapes: Counter[_Shape], odd: Tensor) -> Problem:
    """Return the problem if there are more moments than weights of one shape."""
    count = weights[odd.shape]
    of = (
        f"{count} weights have it, and {shapes[odd.shape]} moments" if count else "no weight has it"
    )
    problem_text = f"`{odd.name[:80]}` has the shape {list(odd.shape)}, but {of}: {_ANOTHER}"
    return Problem(_place(odd), problem_text, is_fatal=True)


def _lost_weights_problem(
    weights: Sequence[Tensor], shapes: Counter[_Shape], odd: Tensor, *, is_lenient: bool
) -> Problem:
    """Return the problem of moments whose weights are missing, if all other weights match."""
    lost_count, places = shapes.total() - len(weights), {_place(weight) for weight in weights}
    follows = "start again" if is_lenient else "would start again with new numbers"
    name = _lost_name(weights, odd.shape)
    example = f"`{name[:80]}`" if name else f"one of the shape {list(odd.shape)}"
    problem_text = (
        f"the optimizer has the state of {shapes.total()} weights, but {lost_count} of them are "
        f"not here, including {example}: they {follows}"
    )
    place = places.pop() if len(places) == 1 else "."
    loses = f"{lost_count} of {shapes.total()} weights"
    return Problem(place, problem_text, loses, is_fatal=not is_lenient, cure=Remedy.COPY)


def _lost_name(weights: Sequence[Tensor], shape: _Shape) -> str:
    """Return the name of a lost weight that exists in all other layers; empty if unknown."""
    layers: dict[tuple[str, str], set[str]] = {}
    numbers: dict[str, set[str]] = {}
    for weight in weights:
        if match := LAYER.fullmatch(weight.name):
            head = weight.name[: -len(match["own"]) - len(match["number"]) - 1]
            numbers.setdefault(head, set()).add(match["number"])
            if weight.shape == shape:
                layers.setdefault((head, match["own"]), set()).add(match["number"])
    for (head, own), present in layers.items():
        missing_numbers = numbers[head] - present
        if len(missing_numbers) == 1:
            return f"{head}{missing_numbers.pop()}.{own}"
    return ""


def _missing_moments(moments: Sequence[Tensor]) -> list[Problem]:
    """Return the problem of the first parameter with only one of the two moments of Adam."""
    tensors_by_base: dict[str, dict[str, Tensor]] = {}
    for moment in moments:
        owner, _, slot = moment.name.rpartition(".")
        tensors_by_base.setdefault(owner, {})[slot] = moment
    if not any(_PAIR <= set(value) for value in tensors_by_base.values()):
        return []
    for owner, slots in tensors_by_base.items():
        missing_slots = _PAIR - set(slots)
        if len(missing_slots) == 1:
            place = _place(next(iter(slots.values())))
            problem_text = f"`{owner[:80]}` has no `{missing_slots.pop()}`, although others have it"
            return [Problem(place, problem_text, is_fatal=True)]
    return []


def _place(tensor: Tensor) -> str:
    return tensor.files[0] if tensor.files else "."


def _place_of(tensor: Tensor) -> str:
    """Return the file of a tensor; empty for a tensor that is split over several files."""
    return tensor.files[0] if len(tensor.files) == 1 and "/" not in tensor.files[0] else ""
