"""Split of a model into stages, and construction of the module tree that runs each stage.

A stage begins at a named module. When the model's forward pass calls that module, the previous
stage ends, and the module's input tensor goes to the next rank. Modules registered before this
module belong to earlier stages. Modules registered after this module belong to this stage or to
later stages.

Each stage runs the model's own forward pass, from its start, on the whole micro-batch. A stand-in
replaces each module of an earlier stage. The stand-in computes only shapes (torch's fake tensors).
The stage's first module gets the real tensor of the previous stage instead of a fake tensor. The
pass ends when it calls the first module of the next stage, and returns the input of that call.
Masks, positions and other values computed from the samples therefore exist in every stage, and only
one tensor goes between stages. If a stage used a second tensor of an earlier stage, this tensor
would be fake. All results computed from this tensor, up to the loss, would be fake too. The
pipeline detects and rejects a fake result.

Parents of replaced modules are copied shallowly, with a new list of children. All other modules are
shared with the user's model. Parameters keep their names in the user's model.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_any, tree_flatten

from resilient.errors import ConfigError
from resilient.strategies.activation_checkpointing import layers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from resilient.strategies.parallelism_options import PipelineOptions

_ANSWERS_MAX = 64


class StageComplete(BaseException):
    """Signal that ends the pass of a stage; a ``BaseException``, so no error handler catches it.

    Attributes:
        tensor: Tensor for the next stage.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor


@cache
def _mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(value: Any) -> bool:
    """Return whether a value has a fake tensor, computed without an earlier stage's modules."""
    return tree_any(lambda leaf: isinstance(leaf, FakeTensor), value)


def shape_only_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module that computes only shapes and needs no memory."""
    memo: dict[int, Any] = {}
    with _mode():
        for parameter in [*module.parameters(), *module.buffers()]:
            empty = torch.empty_strided(
                parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device
            )
            is_parameter = isinstance(parameter, nn.Parameter)
            memo[id(parameter)] = (
                nn.Parameter(empty, requires_grad=False) if is_parameter else empty
            )
    duplicate = copy.deepcopy(module, memo)
    for inner in duplicate.modules():
        # A wrapped forward pass (activation checkpointing) refers to the original module, and hooks
        # need real values.
        inner.__dict__.pop("forward", None)
        inner._forward_hooks.clear()  # noqa: SLF001 - torch removes them by handle alone
        inner._forward_pre_hooks.clear()  # noqa: SLF001
    return duplicate


class _Stub(nn.Module):
    """Stand-in for a module in a tree, with the module's other attributes."""

    def __init__(self, name: str, alike: nn.Module) -> None:
        super().__init__()
        self.__dict__["_alike"] = alike
        self._name_in_model = name

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_alike"], name)


class EarlierStageStub(_Stub):
    """Stand-in for a module of an earlier stage, which returns fake tensors of the right shapes."""

    def __init__(self, name: str, alike: nn.Module) -> None:
        super().__init__(name, alike)
        self._answers: dict[Any, Any] = {}

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return fake tensors; calls with equal input shapes return the same tensors."""
        shapes = _shapes_of((inputs, kwargs))
        if shapes is None or shapes not in self._answers:
            if len(self._answers) >= _ANSWERS_MAX:
                self._answers.clear()
            with torch.no_grad():
                answer = self.__dict__["_alike"](*inputs, **kwargs)
            if shapes is None:
                return answer
            self._answers[shapes] = answer
        return self._answers[shapes]


class StageEntry(_Stub):
    """First module of this stage, which computes with the tensor of the previous stage."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        # Register the module in the tree, so that FSDP shards the module too.
        self.module = module
        self.waiting: torch.Tensor | None = None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module with the received tensor in place of the fake one.

        Raises:
            ConfigError: The module needs another tensor of an earlier stage.
        """
        stage_input, self.waiting = self.waiting, None
        if stage_input is None:
            raise ConfigError(
                f"`{self._name_in_model}`, which starts a stage, is called twice with one "
                "micro-batch, but gets its tensor once: call the model once in `compute_loss`"
            )
        new_inputs, kwargs = _replace_first(inputs, kwargs, stage_input)
        if is_fake((new_inputs, kwargs)):
            raise ConfigError(
                f"`{self._name_in_model}`, which starts a stage, needs a second tensor of earlier "
                "stages, but only one is sent: cut the model elsewhere"
            )
        return self.module(*new_inputs, **kwargs)


class StageExit(_Stub):
    """First module of the next stage, at which a pass ends."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """End the pass with the first tensor.

        Raises:
            StageComplete: Always, unless the first argument is not a tensor.
        """
        raise StageComplete(_first(inputs, kwargs, self._name_in_model))


class LaterStageStub(_Stub):
    """Stand-in for a module of a later stage that begins no stage; no pass reaches it."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Reject the model.

        Raises:
            ConfigError: Always.
        """
        del inputs, kwargs
        raise ConfigError(
            f"the model calls `{self._name_in_model}` before the module that starts its stage: "
            "register it where it is used, or cut the model elsewhere"
        )


class Planner(_Stub):
    """First module of a stage while only shapes are computed."""

    seen: list[torch.Tensor]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Record the input, and continue as a stand-in."""
        self.seen.append(_first(inputs, kwargs, self._name_in_model))
        return self.__dict__["_alike"](*inputs, **kwargs)


class LastPlanner(Planner):
    """First module of the last stage, after which no shape is needed."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Record the input, and end the pass."""
        self.seen.append(_first(inputs, kwargs, self._name_in_model))
        raise StageComplete(self.seen[-1])


def _first(inputs: Any, kwargs: Any, name: str) -> torch.Tensor:
    for value in (*inputs, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            if not value.is_floating_point():
                break
            return value
    raise ConfigError(
        f"`{name}` starts a stage, but its first argument is not a tensor of floating-point numbers"
    )


def _replace_first(inputs: Any, kwargs: Any, tensor: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    for place, value in enumerate(inputs):
        if isinstance(value, torch.Tensor):
            return (*inputs[:place], tensor, *inputs[place + 1 :]), kwargs
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            return inputs, {**kwargs, name: tensor}
    return inputs, kwargs


def _shapes_of(value: Any) -> Any:
    """Return the properties that shapes depend on, as a key; None if unknown."""
    leaves, spec = tree_flatten(value)
    settings: list[Any] = [torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            settings.append((leaf.shape, leaf.dtype, leaf.device))
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            settings.append((type(leaf), leaf))
        else:
            return None
    return (spec, *settings)


def tree_with(model: nn.Module, stand_ins: Mapping[str, nn.Module], name: str = "") -> nn.Module:
    """Return ``model`` with some modules replaced; both share the other modules."""
    if name in stand_ins:
        return stand_ins[name]
    prefix = f"{name}." if name else ""
    if not any(tensor.startswith(prefix) for tensor in stand_ins):
        return model
    tree = copy.copy(model)
    children = {
        child: None if module is None else tree_with(module, stand_ins, f"{prefix}{child}")
        for child, module in model._modules.items()  # noqa: SLF001 - torch has no public way
    }
    tree.__dict__["_modules"] = children
    return tree


class StageModules:
    """Builder of the module trees of a model's stages, while the whole model is on this rank.

    Args:
        model: The user's model.
        cut: Split of the model.
    """

    def __init__(self, model: nn.Module, cut: StageSplit) -> None:
        self._model = model
        self._stage_cut = cut
        self._alike = {name: shape_only_copy(model.get_submodule(name)) for name in cut.units}

    def stage(self, number: int) -> tuple[nn.Module, StageEntry | None]:
        """Return the tree of one stage, and its first module."""
        cut = self._stage_cut
        stand_ins: dict[str, nn.Module] = {}
        for name, stage in cut.units.items():
            if stage < number:
                stand_ins[name] = EarlierStageStub(name, self._alike[name])
            elif stage > number:
                kind = StageExit if name == cut.entries[number] else LaterStageStub
                stand_ins[name] = kind(name, self._alike[name])
        if number == 0:
            return tree_with(self._model, stand_ins), None
        name = cut.entries[number - 1]
        stand_ins[name] = entry = StageEntry(name, self._model.get_submodule(name))
        return tree_with(self._model, stand_ins), entry

    def planner(self) -> StageShapes:
        """Return the planner of the shapes between stages."""
        stand_ins: dict[str, nn.Module] = {
            name: EarlierStageStub(name, alike) for name, alike in self._alike.items()
        }
        entries: list[Planner] = []
        for name in self._stage_cut.entries:
            kind = LastPlanner if name == self._stage_cut.entries[-1] else Planner
            entries.append(kind(name, stand_ins[name]))
            stand_ins[name] = entries[-1]
        return StageShapes(tree_with(self._model, stand_ins), entries)


Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shapes of the inputs of the second stage, the third, ..."""


class StageShapes:
    """Shapes of the tensors between stages, without a computation.

    Args:
        tree: Model of stand-ins.
        entries: Starts of the stages.
    """

    def __init__(self, tree: nn.Module, entries: list[Planner]) -> None:
        self.tree = tree
        self._entries = entries
        self._shapes: dict[Any, Shapes] = {}

    def shapes(self, run: Callable[[nn.Module], Any], batch: Any) -> Shapes:
        """Return the shapes for a micro-batch.

        Args:
            run: Function that calls a model with that batch.
            batch: Batch of which only the shapes are used.

        Raises:
            ConfigError: The model's forward pass does not reach each stage in turn.
        """
        key = _shapes_of((batch, self.tree.training))
        if key is None:
            return self._plan(run)
        if key not in self._shapes:
            if len(self._shapes) >= _ANSWERS_MAX:
                self._shapes.clear()
            self._shapes[key] = self._plan(run)
        return self._shapes[key]

    def _plan(self, run: Callable[[nn.Module], Any]) -> Shapes:
        entry_tensors: list[torch.Tensor] = []
        for entry in self._entries:
            entry.seen = entry_tensors
        try:
            with torch.no_grad(), without_noise():
                run(self.tree)
        except StageComplete:
            pass
        if len(entry_tensors) != len(self._entries):
            names = ", ".join(f"`{entry._name_in_model}`" for entry in self._entries)  # noqa: SLF001
            raise ConfigError(
                f"the model's forward pass does not call {names} once each, in this order: stages "
                "of a pipeline cannot start there"
            )
        return tuple((tuple(tensor.shape), tensor.dtype) for tensor in entry_tensors)


@contextmanager
def without_noise() -> Iterator[None]:
    """Preserve the random generators, because planning shapes must not change the training."""
    cuda: Any = torch.cuda  # partly untyped
    devices = [cuda.current_device()] if cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield


# Containers are never called; the split uses their contents.
_LISTS = (nn.ModuleList, nn.ModuleDict)


class StageSplit(NamedTuple):
    """Split of a model into stages.

    Attributes:
        entries: Names of the modules that begin the stages after the first.
        units: Name of a module -> the stage that has all of its contents. All units together have
            every parameter and every saved buffer, except buffers that are registered beside units.
    """

    entries: tuple[str, ...]
    units: dict[str, int]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.entries) + 1


def split_model(
    model: nn.Module, options: PipelineOptions, layer_classes: Collection[str] = ()
) -> StageSplit:
    """Split ``model`` at the given points, at the model's own points, or evenly.

    A model defines its own points by a method ``pp_split_points(stages)``, which returns names.
    Otherwise the layers are divided evenly. Layers are the modules of ``layer_classes``, or the
    items of the outermost lists.

    Raises:
        ConfigError: The model cannot be cut in this way.
    """
    entries = options.split_points or _own_points(model, options.stages)
    entries = entries or _even_points(model, options.stages, layer_classes)
    _check_entries(model, entries)
    places = _places(model, entries)
    _refuse_ties(model, places)
    return StageSplit(tuple(entries), dict(_units("", model, places, set(entries))))


def beside(model: nn.Module, cut: StageSplit) -> tuple[str, ...]:
    """Return the saved names outside all units, which every stage has."""
    prefixes = tuple(f"{name}." for name in cut.units)
    return tuple(name for name in model.state_dict() if not name.startswith(prefixes))


def _own_points(model: nn.Module, stages: int) -> tuple[str, ...]:
    split_points = getattr(model, "pp_split_points", None)
    if not callable(split_points):
        return ()
    points = tuple(split_points(stages))
    if len(points) != stages - 1:
        raise ConfigError(
            f"`{type(model).__name__}.pp_split_points({stages})` names {len(points)} modules, but "
            f"{stages} stages start at {stages - 1} modules besides the model's start"
        )
    return points


def _even_points(model: nn.Module, stages: int, layer_classes: Collection[str]) -> tuple[str, ...]:
    layers = layers_of(model, layer_classes)
    if len(layers) < stages:
        raise ConfigError(
            f"`{type(model).__name__}` has {len(layers)} layers in lists, and the pipeline "
            f"{stages} stages",
            hint='name the modules that start stages: parallelism_config={"pp_split_points": '
            "[...]}, or hold the layers in a ModuleList",
        )
    names = {id(module): name for name, module in model.named_modules()}
    # The head follows the last layer, so with an uneven division the last stage has fewer layers.
    starts = [-(-len(layers) * stage // stages) for stage in range(1, stages)]
    return tuple(names[id(layers[start])] for start in starts)


def _check_entries(model: nn.Module, entries: Sequence[str]) -> None:
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    for name in entries:
        if not order.get(name):
            raise ConfigError(f"`pp_split_points`: no module inside the model is `{name}`")
        if isinstance(model.get_submodule(name), _LISTS):
            raise ConfigError(
                f"`pp_split_points`: `{name}` is a list, which is never called: name an item of it"
            )
    places = [order[name] for name in entries]
    if places != sorted(set(places)):
        raise ConfigError(
            f"`pp_split_points`: {', '.join(entries)} are not in the order in which the model "
            "registers them"
        )


def _places(model: nn.Module, entries: Sequence[str]) -> dict[str, int]:
    """Return the stage of each module with own parameters or buffers.

    Raises:
        ConfigError: A parameter is beside modules of several stages.
    """
    begins = {name: stage for stage, name in enumerate(entries, 1)}
    places, stage = {}, 0
    for name, module in model.named_modules():
        stage = begins.get(name, stage)
        own_parameters = [tensor for tensor, _ in module.named_parameters(recurse=False)]
        if own_parameters and any(entry.startswith(f"{name}.") or not name for entry in entries):
            raise ConfigError(
                f"`{f'{name}.{own_parameters[0]}'.lstrip('.')}` is beside modules that the "
                "pipeline separates, so no stage could hold it",
                hint="give it its own module",
            )
        if own_parameters or _saved_buffers(module):
            places[name] = stage
    return places


def _saved_buffers(module: nn.Module) -> list[str]:
    """Return the names of a module's own saved buffers."""
    left_out = module._non_persistent_buffers_set  # noqa: SLF001 - torch has no public way
    return [name for name, _ in module.named_buffers(recurse=False) if name not in left_out]


def _refuse_ties(model: nn.Module, places: dict[str, int]) -> None:
    """Raise if two stages use one parameter, because each stage would train its own copy."""
    stages_of: dict[int, set[int]] = defaultdict(set)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stages_of[id(parameter)].add(places[name.rpartition(".")[0]])
        if len(stages_of[id(parameter)]) > 1:
            raise ConfigError(
                f"parameter `{name}` is tied to a parameter of another stage: a cut would untie "
                "them",
                hint="untie them (tie_word_embeddings=False in models of Transformers), or cut "
                "the model elsewhere",
            )


def _units(
    name: str, module: nn.Module, places: dict[str, int], entries: set[str]
) -> Iterator[tuple[str, int]]:
    """Yield the outermost modules that belong to one stage, with their stage."""
    prefix = f"{name}." if name else ""
    stages = {
        stage for tensor, stage in places.items() if tensor == name or tensor.startswith(prefix)
    }
    is_whole = bool(name) and not isinstance(module, _LISTS)
    if is_whole and len(stages) <= 1 and not any(entry.startswith(prefix) for entry in entries):
        if stages:
            yield name, stages.pop()
        elif name in entries:
            raise ConfigError(f"`pp_split_points`: `{name}` holds nothing that is trained")
        return
    for child, submodule in module.named_children():
        yield from _units(f"{prefix}{child}", submodule, places, entries)
