"""Split a model into stages.

A model once per stage: its own containers, and its modules where the stage holds them.

Each stage runs the model's own forward pass, from its start, on the whole micro-batch. Where it
calls a module of an earlier stage, a likeness answers, which computes shapes and nothing else
(torch's fake tensors). The module that begins the stage gets what the stage before has sent in
place of such a tensor. Where the next stage begins, the pass is left, with what it was called
with. So masks, positions and whatever else is made of the samples is there in every stage, and one
tensor alone goes from stage to stage. A second one would be fake wherever it is used, and whatever
is made of it, to the loss: that is found, and refused.

Containers are copied without what is in them; parameters keep their names in the user's model.

Where a model is cut, and which of its modules each stage holds.

A stage begins at a module, which is named: when the model's forward pass calls it, the stage before
is over, and the tensor that it is called with goes to the next rank. What is registered in the
model before that module belongs to the stages before, what is registered after it to those after.
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
    """A pass came to the end of its stage: no error, and no handler of errors stops it.

    Attributes:
        tensor: what goes to the next one.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor


@cache
def _mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(value: Any) -> bool:
    """Say whether anything in a value was made without what an earlier stage holds."""
    return tree_any(lambda one: isinstance(one, FakeTensor), value)


def likeness(module: nn.Module) -> nn.Module:
    """Return a copy of a module that computes shapes, and takes no memory."""
    memo: dict[int, Any] = {}
    with _mode():
        for one in [*module.parameters(), *module.buffers()]:
            empty = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device)
            is_parameter = isinstance(one, nn.Parameter)
            memo[id(one)] = nn.Parameter(empty, requires_grad=False) if is_parameter else empty
    made = copy.deepcopy(module, memo)
    for inner in made.modules():
        # What was put over a forward pass (activation checkpointing) knows the original, and hooks
        # want to see numbers.
        inner.__dict__.pop("forward", None)
        inner._forward_hooks.clear()  # noqa: SLF001 - torch removes them by handle alone
        inner._forward_pre_hooks.clear()  # noqa: SLF001
    return made


class _Stub(nn.Module):
    """Stands in a tree for a module, whose other attributes it has."""

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
    """A module of an earlier stage: says which shapes it would return."""

    def __init__(self, name: str, alike: nn.Module) -> None:
        super().__init__(name, alike)
        self._answers: dict[Any, Any] = {}

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return fake tensors; for shapes that were asked before, the same ones."""
        asked = _shapes_of((inputs, named))
        if asked is None or asked not in self._answers:
            if len(self._answers) >= _ANSWERS_MAX:
                self._answers.clear()
            with torch.no_grad():
                answer = self.__dict__["_alike"](*inputs, **named)
            if asked is None:
                return answer
            self._answers[asked] = answer
        return self._answers[asked]


class StageEntry(_Stub):
    """The module that begins a stage: computes with what the stage before has sent."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        # In the tree, so that whoever shards it finds it.
        self.module = module
        self.waiting: torch.Tensor | None = None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the module with the tensor that waits in place of the one that is not here.

        Raises:
            ConfigError: it needs another tensor of an earlier stage.
        """
        waiting, self.waiting = self.waiting, None
        if waiting is None:
            raise ConfigError(
                f"`{self._name_in_model}`, which begins a stage, is called twice with one "
                "micro-batch, and is given its tensor once: call the model once in `compute_loss`"
            )
        given, named = _replace_first(inputs, named, waiting)
        if is_fake((given, named)):
            raise ConfigError(
                f"`{self._name_in_model}`, which begins a stage, needs a second tensor that "
                "earlier stages make, and one alone is sent: cut the model elsewhere"
            )
        return self.module(*given, **named)


class StageExit(_Stub):
    """The module that begins the next stage: where a pass is left."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Leave the pass with the first tensor.

        Raises:
            StageOver: always, unless there is no such tensor.
        """
        raise StageComplete(_first(inputs, named, self._name_in_model))


class LaterStageStub(_Stub):
    """A module of a later stage, where no stage begins: a pass never comes here."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Refuse the model.

        Raises:
            ConfigError: always.
        """
        del inputs, named
        raise ConfigError(
            f"the model calls `{self._name_in_model}` before the module that begins its stage: "
            "register it where it is used, or cut the model elsewhere"
        )


class Planner(_Stub):
    """A module that begins a stage, where shapes alone are asked for."""

    seen: list[torch.Tensor]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Note what comes here, and go on as a likeness does."""
        self.seen.append(_first(inputs, named, self._name_in_model))
        return self.__dict__["_alike"](*inputs, **named)


class LastPlanner(Planner):
    """The one that begins the last stage, after which nothing is asked."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Note what comes here, and leave."""
        self.seen.append(_first(inputs, named, self._name_in_model))
        raise StageComplete(self.seen[-1])


def _first(inputs: Any, named: Any, name: str) -> torch.Tensor:
    for one in (*inputs, *named.values()):
        if isinstance(one, torch.Tensor):
            if not one.is_floating_point():
                break
            return one
    raise ConfigError(
        f"`{name}` begins a stage, and is not called with a tensor of floating-point numbers first"
    )


def _replace_first(inputs: Any, named: Any, tensor: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    for place, one in enumerate(inputs):
        if isinstance(one, torch.Tensor):
            return (*inputs[:place], tensor, *inputs[place + 1 :]), named
    for name, one in named.items():
        if isinstance(one, torch.Tensor):
            return inputs, {**named, name: tensor}
    return inputs, named


def _shapes_of(value: Any) -> Any:
    """Return what shapes depend on, to look up; None if that is not known."""
    leaves, spec = tree_flatten(value)
    said: list[Any] = [torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")]
    for one in leaves:
        if isinstance(one, torch.Tensor):
            said.append((one.shape, one.dtype, one.device))
        elif one is None or isinstance(one, bool | int | float | str):
            said.append((type(one), one))
        else:
            return None
    return (spec, *said)


def tree_with(model: nn.Module, stand_ins: Mapping[str, nn.Module], name: str = "") -> nn.Module:
    """Return ``model`` with others in place of some of its modules; both share the rest."""
    if name in stand_ins:
        return stand_ins[name]
    inside = f"{name}." if name else ""
    if not any(one.startswith(inside) for one in stand_ins):
        return model
    made = copy.copy(model)
    children = {
        child: None if one is None else tree_with(one, stand_ins, f"{inside}{child}")
        for child, one in model._modules.items()  # noqa: SLF001 - torch has no public way
    }
    made.__dict__["_modules"] = children
    return made


class StageModules:
    """Makes the trees of a model's stages, while all of the model is here.

    Args:
        model: the user's.
        cut: where it is cut.
    """

    def __init__(self, model: nn.Module, cut: StageSplit) -> None:
        self._model = model
        self._cut = cut
        self._alike = {name: likeness(model.get_submodule(name)) for name in cut.units}

    def stage(self, number: int) -> tuple[nn.Module, StageEntry | None]:
        """Return the tree of one stage, and the module in it that begins the stage."""
        cut = self._cut
        stands: dict[str, nn.Module] = {}
        for name, stage in cut.units.items():
            if stage < number:
                stands[name] = EarlierStageStub(name, self._alike[name])
            elif stage > number:
                kind = StageExit if name == cut.entries[number] else LaterStageStub
                stands[name] = kind(name, self._alike[name])
        if number == 0:
            return tree_with(self._model, stands), None
        name = cut.entries[number - 1]
        stands[name] = entry = StageEntry(name, self._model.get_submodule(name))
        return tree_with(self._model, stands), entry

    def planner(self) -> StageShapes:
        """Return what says the shapes that go from stage to stage."""
        stands: dict[str, nn.Module] = {
            name: EarlierStageStub(name, alike) for name, alike in self._alike.items()
        }
        entries: list[Planner] = []
        for name in self._cut.entries:
            kind = LastPlanner if name == self._cut.entries[-1] else Planner
            entries.append(kind(name, stands[name]))
            stands[name] = entries[-1]
        return StageShapes(tree_with(self._model, stands), entries)


Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Of the tensors that go to the second stage, the third, ..."""


class StageShapes:
    """Says which tensors go from stage to stage, without computing them.

    Args:
        tree: of likenesses.
        entries: where stages begin.
    """

    def __init__(self, tree: nn.Module, entries: list[Planner]) -> None:
        self.tree = tree
        self._entries = entries
        self._known: dict[Any, Shapes] = {}

    def shapes(self, run: Callable[[nn.Module], Any], batch: Any) -> Shapes:
        """Return the shapes that a micro-batch makes.

        Args:
            run: calls a model with that batch.
            batch: only its own shapes are looked at.

        Raises:
            ConfigError: the model's forward pass does not come to each stage in turn.
        """
        asked = _shapes_of((batch, self.tree.training))
        if asked is None:
            return self._plan(run)
        if asked not in self._known:
            if len(self._known) >= _ANSWERS_MAX:
                self._known.clear()
            self._known[asked] = self._plan(run)
        return self._known[asked]

    def _plan(self, run: Callable[[nn.Module], Any]) -> Shapes:
        seen: list[torch.Tensor] = []
        for one in self._entries:
            one.seen = seen
        try:
            with torch.no_grad(), without_noise():
                run(self.tree)
        except StageComplete:
            pass
        if len(seen) != len(self._entries):
            names = ", ".join(f"`{one._name_in_model}`" for one in self._entries)  # noqa: SLF001
            raise ConfigError(
                f"the model's forward pass does not call {names} once each, in this order: stages "
                "of a pipeline cannot begin there"
            )
        return tuple((tuple(one.shape), one.dtype) for one in seen)


@contextmanager
def without_noise() -> Iterator[None]:
    """Leave random numbers as they are: who asks for shapes must not change what is trained."""
    cuda: Any = torch.cuda  # partly untyped
    devices = [cuda.current_device()] if cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield


# Not called themselves, but gone through: what they hold is cut from them.
_LISTS = (nn.ModuleList, nn.ModuleDict)


class StageSplit(NamedTuple):
    """How a model is cut.

    Attributes:
        entries: names of the modules that begin the stages after the first.
        units: name of a module -> the stage that holds all that is in it. Together they hold
            every parameter and every buffer that is saved, but for buffers beside modules.
    """

    entries: tuple[str, ...]
    units: dict[str, int]

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.entries) + 1


def split_model(
    model: nn.Module, options: PipelineOptions, layer_classes: Collection[str] = ()
) -> StageSplit:
    """Return how ``model`` is cut: where it was told, where the model says, or evenly.

    A model says it by a method ``pp_split_points(stages)``, which returns names. Else its layers
    (those of ``layer_classes``, or the items of its outermost lists) are dealt evenly.

    Raises:
        ConfigError: it cannot be cut so.
    """
    entries = options.split_points or _own_points(model, options.stages)
    entries = entries or _even_points(model, options.stages, layer_classes)
    _check_entries(model, entries)
    places = _places(model, entries)
    _refuse_ties(model, places)
    return StageSplit(tuple(entries), dict(_units("", model, places, set(entries))))


def beside(model: nn.Module, cut: StageSplit) -> tuple[str, ...]:
    """Return the names of what is saved and lies in no unit, so that every stage has it."""
    inside = tuple(f"{name}." for name in cut.units)
    return tuple(name for name in model.state_dict() if not name.startswith(inside))


def _own_points(model: nn.Module, stages: int) -> tuple[str, ...]:
    says = getattr(model, "pp_split_points", None)
    if not callable(says):
        return ()
    points = tuple(says(stages))
    if len(points) != stages - 1:
        raise ConfigError(
            f"`{type(model).__name__}.pp_split_points({stages})` names {len(points)} modules, and "
            f"{stages} stages begin at {stages - 1} besides the model's start"
        )
    return points


def _even_points(model: nn.Module, stages: int, layer_classes: Collection[str]) -> tuple[str, ...]:
    layers = layers_of(model, layer_classes)
    if len(layers) < stages:
        raise ConfigError(
            f"`{type(model).__name__}` has {len(layers)} layers in lists, and the pipeline "
            f"{stages} stages",
            hint='name the modules that begin stages: parallelism_config={"pp_split_points": [...]}'
            ", or hold the layers in a ModuleList",
        )
    names = {id(one): name for name, one in model.named_modules()}
    # The head comes after the last layer, so where they do not divide, the last stage has fewer.
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
    """Return the stage of each module that holds something itself.

    Raises:
        ConfigError: a parameter lies beside modules, some of which other stages hold.
    """
    begins = {name: stage for stage, name in enumerate(entries, 1)}
    places, stage = {}, 0
    for name, module in model.named_modules():
        stage = begins.get(name, stage)
        own = [one for one, _ in module.named_parameters(recurse=False)]
        if own and any(entry.startswith(f"{name}.") or not name for entry in entries):
            raise ConfigError(
                f"`{f'{name}.{own[0]}'.lstrip('.')}` lies beside modules that the pipeline cuts "
                "apart, so no stage could hold it",
                hint="give it a module of its own",
            )
        if own or _saved_buffers(module):
            places[name] = stage
    return places


def _saved_buffers(module: nn.Module) -> list[str]:
    """Return the names of a module's own buffers that are saved."""
    left_out = module._non_persistent_buffers_set  # noqa: SLF001 - torch has no public way
    return [name for name, _ in module.named_buffers(recurse=False) if name not in left_out]


def _refuse_ties(model: nn.Module, places: dict[str, int]) -> None:
    """Raise if a parameter is used in two stages: each would train a copy of its own."""
    held: dict[int, set[int]] = defaultdict(set)
    for name, one in model.named_parameters(remove_duplicate=False):
        held[id(one)].add(places[name.rpartition(".")[0]])
        if len(held[id(one)]) > 1:
            raise ConfigError(
                f"parameter `{name}` is tied to one of another stage: cut apart it would not be",
                hint="untie them (tie_word_embeddings=False in models of Transformers), or cut "
                "the model elsewhere",
            )


def _units(
    name: str, module: nn.Module, places: dict[str, int], entries: set[str]
) -> Iterator[tuple[str, int]]:
    """Yield the outermost modules that one stage holds, and which it is."""
    inside = f"{name}." if name else ""
    stages = {stage for one, stage in places.items() if one == name or one.startswith(inside)}
    is_whole = bool(name) and not isinstance(module, _LISTS)
    if is_whole and len(stages) <= 1 and not any(one.startswith(inside) for one in entries):
        if stages:
            yield name, stages.pop()
        elif name in entries:
            raise ConfigError(f"`pp_split_points`: `{name}` holds nothing that is trained")
        return
    for child, one in module.named_children():
        yield from _units(f"{inside}{child}", one, places, entries)
