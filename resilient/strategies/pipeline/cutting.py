"""Where a model is cut, and which of its modules each stage holds.

A stage begins at a module, which is named: when the model's forward pass calls it, the stage before
is over, and the tensor that it is called with goes to the next rank. What is registered in the
model before that module belongs to the stages before, what is registered after it to those after.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from resilient.errors import ConfigError
from resilient.strategies.recomputing import layers_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from resilient.strategies.pipeline.options import PipelineOptions

# Not called themselves, but gone through: what they hold is cut from them.
_LISTS = (nn.ModuleList, nn.ModuleDict)


class Cut(NamedTuple):
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


def cut_model(
    model: nn.Module, options: PipelineOptions, layer_classes: Collection[str] = ()
) -> Cut:
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
    return Cut(tuple(entries), dict(_units("", model, places, set(entries))))


def beside(model: nn.Module, cut: Cut) -> tuple[str, ...]:
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
