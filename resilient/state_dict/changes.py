"""Differences between a checkpoint and the live objects that torch would load without an error.

For example, torch loads the state of another scheduler class, and rounds weights to a narrower
dtype. It also ignores saved state for which the run has no object. The run then continues with
unintended values. A resume therefore compares the checkpoint with the live objects before the load.
It reports each difference, and refuses a difference that makes the intended result impossible.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from resilient.errors import IncompatibleCheckpoint, UnsavableState
from resilient.events import Event, Level
from resilient.format.digest import digest_bytes
from resilient.format.manifest import TensorEntry
from resilient.state_dict.capture_cache import fast_state_dict
from resilient.state_dict.flatten import flatten
from resilient.state_dict.sharding import DTYPE_NAMES, TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping

    from resilient.format.manifest import Manifest
    from resilient.state_dict.snapshot import Part

SETUP = "objects"
"""Field of a manifest's ``config`` that describes optimizers and schedulers at their creation."""

ALL = "all"
_SHOWN_MAX = 3
_SCALARS = (bool, int, float, str, type(None))
_COUNTERS = frozenset(
    {
        *("last_epoch", "base_lrs", "lr_lambdas", "num_bad_epochs", "cooldown_counter", "best"),
        *("optimizer", "mode_worse", "last_lr"),
    }
)
_COMMON = frozenset({"base_lrs", "last_epoch", "verbose"})
_RECORDED = {
    "resilient.train.optimizers.third_party.MuonWithAdamW": (
        "resilient.train.optimizers.muon.MuonWithAdamW"
    ),
    "resilient.train.schedules.factory.RateLR": "resilient.train.schedules.deepspeed.RateLR",
}
"""Earlier names of our own classes, which old checkpoints contain."""


@dataclass(frozen=True, slots=True)
class StateChange:
    """One difference.

    Attributes:
        part: Part, as ``resume_changes`` names it.
        text: Both values and the consequence.
        is_refused: Whether the run may continue only if ``resume_changes`` has the part.
        is_fresh: Whether the part starts from its initial state if the difference is allowed.
    """

    part: str
    text: str
    is_refused: bool = False
    is_fresh: bool = False


@dataclass(frozen=True, slots=True)
class StateChanged(Event):
    """The live objects differ from those that saved the checkpoint."""

    level: ClassVar[Level] = Level.WARNING
    checkpoint: str
    changes: tuple[StateChange, ...]

    def message(self) -> str:
        """Return the message: one line per part, with both values and the consequence."""
        text = (f"\n  {change.part}: {change.text}" for change in self.changes)
        return f"objects differ from those of {self.checkpoint}:{''.join(text)}"


def _always(_: Mapping[str, Any]) -> bool:
    return True


def _no_changes(_: Iterable[str]) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class ChangePolicy:
    """Differences that a resume reports and allows.

    Attributes:
        allowed: Names of parts that may differ, or ``all``.
        compares_options: Function from the saved configuration to whether options of optimizers and
            schedulers are compared.
        lost: Function that returns the saved parts without a live object, from all saved names.
        hint: Instruction for a refusal, with ``{names}`` for the list of parts.
        prefix: Prefix of a part's name in ``allowed`` and in the hint.
    """

    allowed: frozenset[str] = frozenset()
    compares_options: Callable[[Mapping[str, Any]], bool] = _always
    lost: Callable[[Iterable[str]], tuple[str, ...]] = _no_changes
    hint: str = "resume with the objects that were saved"
    prefix: str = ""

    def allows(self, part: str) -> bool:
        """Return whether a part may differ."""
        return f"{self.prefix}{part}" in self.allowed or ALL in self.allowed


class ResumeCheck:
    """Comparison of a checkpoint with the live objects before the first part is loaded.

    Args:
        setup: Setup of this run, from :func:`setup_of`.
        policy: Differences that are allowed.
        emit: Receiver of the event.
        examine: Function that gets the saved configuration first and may refuse the resume.
    """

    def __init__(
        self,
        setup: Mapping[str, Any],
        policy: ChangePolicy,
        emit: Callable[[Event], None],
        examine: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._setup = setup
        self._policy = policy
        self._emit = emit
        self.examine = examine

    def fresh_parts(
        self, manifest: Manifest, trees: Mapping[str, Any], parts: Mapping[str, Part]
    ) -> frozenset[str]:
        """Return the parts that the resume does not load, because the user allowed a difference.

        Args:
            manifest: Manifest of the checkpoint.
            trees: Saved state by part, as :func:`resilient.state_dict.flatten.flatten` made it.
            parts: Live objects.

        Raises:
            IncompatibleCheckpoint: A difference is refused; nothing was loaded.
        """
        policy, saved_setup = self._policy, manifest.config.get(SETUP, {})
        compares = policy.compares_options(manifest.config)
        changes = [*_setup_changes(saved_setup, self._setup, options=compares)]
        changes += _added_groups(saved_setup, self._setup, trees, parts)
        changes += _scheduler_changes(trees, parts, known_names=saved_setup.keys())
        changes += _model_changes(manifest.tensors, trees, parts)
        lost_parts = policy.lost(entry.name for entry in manifest.parts)
        changes += (
            StateChange(
                part, "saved, but not passed to this run: it would be lost", is_refused=True
            )
            for part in lost_parts
        )
        refused = [
            change for change in changes if change.is_refused and not policy.allows(change.part)
        ]
        if refused:
            raise self._refusal(manifest, refused)
        reported = tuple(change for change in changes if change.part not in lost_parts)
        if reported:
            self._emit(StateChanged(manifest.checkpoint.folder, reported))
        return frozenset(change.part for change in changes if change.is_fresh)

    def _refusal(self, manifest: Manifest, refused: list[StateChange]) -> IncompatibleCheckpoint:
        lines = "; ".join(f"`{change.part}`: {change.text}" for change in refused)
        parts = dict.fromkeys(change.part for change in refused)
        names = ", ".join(f'"{self._policy.prefix}{name}"' for name in parts)
        return IncompatibleCheckpoint(
            f"cannot resume {manifest.checkpoint} with other objects: {lines}; nothing was loaded",
            hint=self._policy.hint.format(names=names),
        )


def setup_of(parts: Mapping[str, Part]) -> dict[str, Any]:
    """Describe optimizers and schedulers at their creation. Call this function before the load.

    Returns:
        By part: ``class``, and ``options``: numbers, texts, and lists of numbers or texts.
    """
    setup: dict[str, Any] = {}
    for name, part in parts.items():
        stateful: Any = part.stateful
        scheduler = scheduler_in(stateful)
        optimizer = getattr(stateful, "optimizer", None)
        if scheduler is not None:
            setup[name] = {"class": class_of(scheduler), "options": _options(vars(scheduler))}
        elif isinstance(stateful, torch.optim.Optimizer):
            setup[name] = _optimizer_setup(stateful)
        elif isinstance(optimizer, torch.optim.Optimizer):
            setup[name] = _optimizer_setup(optimizer)
    return setup


def class_of(value: Any) -> str:
    """Return the class of an object with its module, and the classes of schedulers inside it."""
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    name = _RECORDED.get(name, name)
    inner = getattr(value, "_schedulers", None) if isinstance(value, LRScheduler) else None
    return f"{name}({', '.join(map(class_of, inner))})" if inner else name


def scheduler_in(stateful: Any) -> Any:
    """Return a torch scheduler, or the scheduler inside a stateful; None without one."""
    for candidate in (stateful, getattr(stateful, "scheduler", None)):
        if isinstance(candidate, LRScheduler | ReduceLROnPlateau):
            return candidate
    return None


def _optimizer_setup(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options: dict[str, Any] = {"groups": len(optimizer.param_groups)}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in _options(group).items():
            # Most groups have the optimizer's options, so the description omits repeated values.
            if number == 0 or options.get(key) != value:
                options[f"{key} of group {number}" if number else key] = value
    return {"class": class_of(optimizer), "options": options}


def _options(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the values that are numbers, texts, or lists of numbers or texts."""
    options: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(key, str) or key.startswith("_") or key in _COUNTERS or key == "params":
            continue
        plain = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if isinstance(plain, list | tuple) and len(plain) <= _SHOWN_MAX:
            plain = [*plain]
        plain_options = plain if isinstance(plain, list) else [plain]
        if key != "param_names" and all(type(option) in _SCALARS for option in plain_options):
            options[key] = (
                [_finite(option) for option in plain_options]
                if plain is plain_options
                else _finite(plain)
            )
    return options


def _finite(value: Any) -> Any:
    """Return a value in JSON form; a manifest holds no NaN and no infinity."""
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _setup_changes(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, options: bool
) -> Iterator[StateChange]:
    """Compare two setups; parts that one setup lacks are not compared."""
    for name in [change for change in current if change in saved]:
        saved_part, current_part = saved[name], current[name]
        if saved_part["class"] != current_part["class"]:
            is_scheduler = "groups" not in current_part["options"]
            follows = (
                "the rate would follow neither schedule"
                if is_scheduler
                else "the new class loads the saved state"
            )
            text = f"class {saved_part['class']} -> {current_part['class']}: {follows}"
            yield StateChange(name, text, is_refused=is_scheduler, is_fresh=is_scheduler)
        elif options:
            yield from _option_changes(name, saved_part["options"], current_part["options"])


def _option_changes(
    name: str, old: Mapping[str, Any], new: Mapping[str, Any]
) -> Iterator[StateChange]:
    change_texts = [
        f"{key} {old[key]!r} -> {value!r}"
        for key, value in new.items()
        if key in old and old[key] != value
    ]
    if change_texts:
        follows = "the values of the checkpoint are used: they are part of its state"
        yield StateChange(name, f"{', '.join(change_texts)}: {follows}")


def _added_groups(
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    trees: Mapping[str, Any],
    parts: Mapping[str, Part],
) -> Iterator[StateChange]:
    """Add the groups to optimizers that the saved training had added after their creation.

    If this run creates an optimizer with other groups than the saving run, names are compared.
    """
    for name in [part for part in trees if part in saved and part in current]:
        stateful: Any = parts[name].stateful
        groups = saved[name]["options"].get("groups")
        if not hasattr(stateful, "adds_groups") or groups != current[name]["options"]["groups"]:
            continue
        count = len(trees[name]["param_groups"]) - groups
        stateful.adds_groups = count > 0
        if count > 0:
            text = f"groups {groups} -> {groups + count}: training had added groups, added again"
            yield StateChange(name, text)


def _scheduler_changes(
    trees: Mapping[str, Any], parts: Mapping[str, Part], known_names: Collection[str]
) -> Iterator[StateChange]:
    """Find schedulers with other groups, and saved keys of another scheduler class."""
    for name, tree in trees.items():
        scheduler = scheduler_in(parts[name].stateful)
        if scheduler is None or not isinstance(tree, dict):
            continue
        if scheduler is parts[name].stateful:
            yield from _rate_changes(name, tree, scheduler)
        if name in known_names:
            continue
        own_groups = {key for key in scheduler.state_dict() if not key.startswith("_")} - _COMMON
        saved_keys = {key for key in tree if not key.startswith(("_", "$"))} - _COMMON
        if own_groups - saved_keys and saved_keys - own_groups:
            text = (
                f"saved by a scheduler with {_listed(saved_keys - own_groups)}, and "
                f"{type(scheduler).__name__} has {_listed(own_groups - saved_keys)}: "
                "the rate would follow neither schedule"
            )
            yield StateChange(name, text, is_refused=True, is_fresh=True)


def _rate_changes(name: str, tree: Mapping[str, Any], scheduler: Any) -> Iterator[StateChange]:
    """Find schedulers with another number of groups, for which torch would leave out a rate."""
    saved_rates, live_rates = tree.get("base_lrs"), getattr(scheduler, "base_lrs", None)
    if (
        isinstance(saved_rates, list)
        and live_rates is not None
        and len(saved_rates) != len(live_rates)
    ):
        text = (
            f"saved rates of {len(saved_rates)} groups, and the optimizer has {len(live_rates)} "
            "groups"
        )
        yield StateChange(name, text, is_refused=True, is_fresh=True)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)[:_SHOWN_MAX])


def refused_changes(
    saved: Mapping[str, Part], live: Mapping[str, Part], policy: ChangePolicy
) -> tuple[StateChange, ...]:
    """Return the differences for which a resume would refuse a state that is about to be stored.

    Schedulers are compared by their keys, and modules by their dtypes and their tied tensors, as a
    resume from the stored state would compare them.

    Args:
        saved: Parts to store.
        live: Objects of this run, by the names of their parts.
        policy: Differences that are allowed.
    """
    trees: dict[str, Any] = {}
    entries: list[TensorEntry] = []
    all_tensors: dict[str, torch.Tensor] = {}
    for name in live.keys() & saved.keys():
        trees[name], tensors = flatten(name, fast_state_dict(saved[name].stateful))
        entries += (
            TensorEntry(path, name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), ())
            for path, tensor in tensors.items()
        )
        all_tensors |= tensors
    changes = [
        *_scheduler_changes(trees, live, known_names=()),
        *_model_changes(entries, trees, live, lambda entry: _digest_of(all_tensors[entry.name])),
    ]
    return tuple(
        change for change in changes if change.is_refused and not policy.allows(change.part)
    )


def _stored_content(entry: TensorEntry) -> Hashable:
    """Return a value that is equal for stored tensors of equal bytes."""
    return tuple((region.region, region.digest) for region in entry.regions)


def _digest_of(tensor: torch.Tensor) -> Hashable:
    """Return a value that is equal for tensors of equal bytes; not to compare with stored ones."""
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return tuple(tensor.shape), digest_bytes(flat.numpy().data)


def _model_changes(
    tensors: Iterable[TensorEntry],
    trees: Mapping[str, Any],
    parts: Mapping[str, Part],
    content_of: Callable[[TensorEntry], Hashable] = _stored_content,
) -> Iterator[StateChange]:
    entries = {entry.name: entry for entry in tensors}
    for name, tree in trees.items():
        model = parts[name].stateful
        if not isinstance(model, nn.Module) or parts[name].scope != "replicated":
            continue
        try:
            live, own_tensors = flatten(name, fast_state_dict(model))
        except UnsavableState:
            # Parameters without memory have no dtype to compare.
            continue
        saved_names, live_names = _names(tree), _names(live)
        pairs = [
            (path, entries[saved_names[path]], own_tensors[live_names[path]])
            for path in live_names
            if path in saved_names and saved_names[path] in entries
        ]
        yield from _dtype_changes(name, pairs)
        yield from _tie_changes(name, saved_names, live_names, entries, content_of)


def _names(tree: Any) -> dict[str, str]:
    """Return the name of the tensor at each key of a model's tree; tied keys have one name."""
    pairs = tree.get("$odict", tree.items()) if isinstance(tree, dict) else ()
    return {
        key: node["$tensor"]
        for key, node in pairs
        if isinstance(node, dict) and [*node] == ["$tensor"]
    }


def _dtype_changes(
    name: str, pairs: Iterable[tuple[str, TensorEntry, torch.Tensor]]
) -> Iterator[StateChange]:
    names_by_dtypes: dict[tuple[torch.dtype, torch.dtype], list[str]] = defaultdict(list)
    for path, entry, tensor in pairs:
        saved_dtype = TORCH_DTYPES[entry.dtype]
        if saved_dtype != tensor.dtype:
            names_by_dtypes[saved_dtype, tensor.dtype].append(path)
    for (saved_dtype, live_dtype), paths in names_by_dtypes.items():
        count_text = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        is_narrower = not _holds(live_dtype, saved_dtype)
        follows = "digits would be lost" if is_narrower else "the values stay equal"
        text = f"dtype {saved_dtype} -> {live_dtype} of `{paths[0]}`{count_text}: {follows}"
        yield StateChange(name, text, is_refused=is_narrower)


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Return whether a dtype can represent every value of another dtype."""
    try:
        return torch.promote_types(wide, narrow) == wide
    except RuntimeError:
        # torch does not promote float8 dtypes. Every float8 dtype fits in bfloat16 and wider
        # dtypes.
        return wide.is_floating_point and wide.itemsize > narrow.itemsize


def _tie_changes(
    name: str,
    saved: Mapping[str, str],
    current: Mapping[str, str],
    entries: Mapping[str, TensorEntry],
    content_of: Callable[[TensorEntry], Hashable],
) -> Iterator[StateChange]:
    """Find tied weights that are separate in this run, and the reverse."""
    for paths in _tied_keys(saved, current):
        if len({current[path] for path in paths}) > 1:
            text = f"{_listed(paths)} were one tied tensor, and are separate here"
            yield StateChange(name, f"{text}: they would be trained separately", is_refused=True)
    for paths in _tied_keys(current, saved):
        tensor_names = {saved[path] for path in paths}
        content = {content_of(entries[tensor]) for tensor in tensor_names if tensor in entries}
        if len(content) > 1:
            text = f"{_listed(paths)} were separate tensors, and are one tied tensor here"
            yield StateChange(name, f"{text}: all values but one would be lost", is_refused=True)


def _tied_keys(names: Mapping[str, str], others: Mapping[str, str]) -> list[list[str]]:
    """Return the keys that share a tensor, without keys that only one side has."""
    groups: dict[str, list[str]] = defaultdict(list)
    for path, tensor in names.items():
        if path in others:
            groups[tensor].append(path)
    return [paths for paths in groups.values() if len(paths) > 1]
