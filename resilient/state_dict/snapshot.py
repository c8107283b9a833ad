"""Parts (named objects of a checkpoint, such as ``model``) and snapshots of their state.

A snapshot copies no tensors: it shares memory with training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from resilient.errors import ConfigError, UnsavableState
from resilient.format.keys import MANIFEST, STATE_DOCUMENT, is_file_name, rank_part
from resilient.state_dict.capture_cache import fast_state_dict
from resilient.state_dict.flatten import PLAIN, flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from resilient.state_dict.flatten import Tensors


class Stateful(Protocol):
    """Protocol of saved objects, such as modules and optimizers."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state as nested dicts, lists, tensors and plain values."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        """Load a result of ``state_dict``."""


@dataclass(frozen=True, slots=True)
class Part:
    """One named object of a checkpoint.

    Attributes:
        stateful: Object whose state is saved and loaded.
        scope: ``replicated`` if every rank has the same value; each rank then writes a share of it.
            ``rank`` if each rank has its own value.
        document: Name of the part's own human-readable JSON file; such a part has no tensors. If
            empty, ``state.json`` contains the part.
        optional: Whether a checkpoint without the part can be resumed; any other part is required.
        rows: Field of the document whose list ``load_state_dict`` gets as
            :class:`~resilient.format.state_json.JsonRows`; ``state_dict`` may return it too.
    """

    stateful: Stateful
    scope: Literal["replicated", "rank"] = "replicated"
    document: str = ""
    optional: bool = False
    rows: str = ""


class PartFlattener(Protocol):
    """Custom conversion of a part's state."""

    def flatten_part(self, part: str, stateful: Any) -> tuple[Any, Tensors]:
        """Return the state as a tree, and the tensors in it."""


@dataclass(frozen=True, slots=True)
class FlattenedPart:
    """Flattened state of one part; the tensors share memory with training."""

    name: str
    scope: Literal["replicated", "rank"]
    document: str
    tree: Any
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One rank's named state at one step; shares memory with training."""

    step: int
    parts: tuple[FlattenedPart, ...]


def capture(
    step: int, parts: Mapping[str, Part], rank: int, flattener: PartFlattener | None = None
) -> Snapshot:
    """Flatten the state of every part, without copying a tensor.

    Crash: nothing was stored.

    Args:
        step: Step of the state.
        parts: Parts by name; names are file names without an ending.
        rank: This rank; its number becomes part of the name of a per-rank part.
        flattener: Conversion of the parts, for example
            :class:`~resilient.state_dict.capture_cache.CaptureCache`, which reuses earlier
            captures.

    Raises:
        UnsavableState: A value needs pickle, or a document has a tensor.
        ConfigError: The name of a part is not a valid file name, or two parts have the same name or
            file.
    """
    _require_distinct_names(parts)
    flatten_part = _flatten_part if flattener is None else flattener.flatten_part
    return Snapshot(
        step, tuple(_capture_part(name, part, rank, flatten_part) for name, part in parts.items())
    )


def _require_distinct_names(parts: Mapping[str, Part]) -> None:
    """Raise if two parts would be stored under one name, or in one document.

    Raises:
        ConfigError: The message names both parts.
    """
    documents: dict[str, str] = {MANIFEST: "the manifest", STATE_DOCUMENT: "the other parts"}
    for name, part in parts.items():
        owner, _, number = name.rpartition("_")
        of_ranks = parts.get(owner) if number.isdecimal() and part.scope == "replicated" else None
        if of_ranks is not None and of_ranks.scope == "rank":
            raise ConfigError(
                f"`{name}` is reserved: a rank stores its own `{owner}` under this name",
                hint=f"give `{name}` another name",
            )
        if part.document and part.scope == "replicated":
            if part.document in documents:
                raise ConfigError(
                    f"`{name}` cannot be stored in `{part.document}`: "
                    f"{documents[part.document]} is stored there",
                    hint="give the document another name",
                )
            documents[part.document] = f"`{name}`"


def _capture_part(
    name: str, part: Part, rank: int, flatten_part: Callable[[str, Any], tuple[Any, Tensors]]
) -> FlattenedPart:
    if not is_file_name(f"{name}.json") or "." in name:
        raise ConfigError(
            f"`{name}` cannot name a part: use letters, digits, `_` and `-`",
            hint="choose another name; a resume finds the part by its name",
        )
    stored_name = rank_part(name, rank) if part.scope == "rank" else name
    tree, tensors = flatten_part(stored_name, part.stateful)
    if part.document and tensors:
        raise UnsavableState(
            f"`{next(iter(tensors))}` is a tensor in a part that is a document for people",
            path=next(iter(tensors)),
            hint="return numbers from its state_dict(), or omit `document` of the part",
        )
    if part.scope == "rank":
        _refuse_shards(tensors)
    return FlattenedPart(stored_name, part.scope, part.document, tree, tensors)


def _flatten_part(part: str, stateful: Any) -> tuple[Any, Tensors]:
    return flatten(part, fast_state_dict(stateful))


def _refuse_shards(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise if a tensor of a per-rank part is sharded over ranks."""
    for name, tensor in tensors.items():
        if type(tensor) not in PLAIN:
            raise UnsavableState(
                f"`{name}` is sharded over ranks, but the part belongs to each rank alone",
                path=name,
                hint='give the part the scope "replicated", or return the local tensor from '
                "state_dict()",
            )
