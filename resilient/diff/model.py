"""Data model of a comparison: views of two checkpoints, and the changes between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from resilient.layouts.model import OTHER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from resilient.layouts.model import Tensor
    from resilient.storage.folder import DirectoryListing, Folder

CONFIG, MODEL_CONFIG, SOFTWARE = "config", "model_config", "software"
TRAINER, SCHEDULE, GROUPS, DATA = "trainer", "schedule", "groups", "data"
SECTIONS = (CONFIG, MODEL_CONFIG, SOFTWARE, TRAINER, SCHEDULE, GROUPS, DATA)
"""Sections of fields, in the order of display."""


@dataclass(frozen=True, slots=True)
class RngState:
    """State of a random generator.

    Attributes:
        words: Block of a Mersenne Twister as little-endian u32; empty for any other generator.
        position: Number of drawn words of the block; for Philox the offset.
        rest: Other state that affects the next draws, such as a cached normal.
        seed: Seed of Philox.
    """

    words: bytes
    position: int
    rest: bytes = b""
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """View of one of two checkpoints in a comparison.

    Attributes:
        url: URL of the checkpoint, without secrets.
        layout: Short name of the layout; ``resilient`` for a native checkpoint.
        name: Name of the checkpoint in the folder or repository.
        step: Number of optimizer steps.
        world: Number of ranks that wrote the checkpoint.
        folder: Folder of the files.
        listing: Its files.
        tensors: All tensors, as whole tensors.
        fields: Plain values by section and by name.
        random: States of generators, by rank and kind.
        rates: Learning rates with which training would continue.
        order: Names of the parameters by their position in the optimizer, if known.
        history: Log entries, in order.
        notes: Content that cannot be compared, with reasons.
        opaque: Function that returns the digests of opaque content by place, and notes on
            unreadable content.
    """

    url: str
    layout: str
    name: str
    step: int | None
    world: int | None
    folder: Folder
    listing: DirectoryListing
    tensors: tuple[Tensor, ...]
    fields: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    random: Mapping[tuple[int, str], RngState] = field(default_factory=dict)
    rates: tuple[float, ...] = ()
    order: tuple[str, ...] = ()
    history: tuple[Any, ...] = ()
    notes: tuple[str, ...] = ()
    opaque: Callable[[], tuple[Mapping[str, Opaque], Sequence[str]]] = lambda: ({}, ())


@dataclass(frozen=True, slots=True)
class Opaque:
    """Digest of opaque content; ``is_cut``: whether the content depends on the number of ranks."""

    digest: bytes
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class OpaqueChange:
    """Opaque content that differs; ``is_in`` is as in :class:`FieldChange`."""

    place: str
    is_in: str = "both"


@dataclass(frozen=True, slots=True)
class FieldChange:
    """A field that differs; ``is_in`` names the only side with the field, or ``both``."""

    section: str
    name: str
    before: Any
    after: Any
    is_in: str = "both"


@dataclass(frozen=True, slots=True)
class RandomChange:
    """Comparison of the generators of one kind on one rank.

    Attributes:
        rank: Rank of the generators.
        kind: ``python``, ``numpy``, ``cpu`` or ``cuda 0``.
        same: Whether the next draws are the same; None if one side has no generator.
        draws: Number of words by which the second generator is ahead of the first generator;
            negative if it is behind. None if the streams differ, or the distance exceeds the search
            limit.
        is_in: ``both``, ``a`` or ``b``.
    """

    rank: int
    kind: str
    same: bool | None
    draws: int | None = None
    is_in: str = "both"


@dataclass(frozen=True, slots=True)
class Measures:
    """Distances between two tensors.

    Differences are between values. If both tensors have the same dtype, equality is bitwise. The
    distances exclude elements that are not finite on either side; separate fields count these
    elements.

    Attributes:
        elements: Number of elements.
        changed: Number of elements that differ in bits, or in value if the dtypes differ.
        max_abs: Largest absolute difference.
        relative: L2 norm of the difference, divided by the L2 norm of the first tensor; None if
            that is zero.
        cosine: Cosine similarity; None if one tensor is zero.
        max_ulp: Largest distance in representable numbers; None for integers and for different
            dtypes.
        norms: L2 norm of each tensor.
        nans: Number of NaN elements of each tensor.
        infinite: Number of infinite elements of each tensor.
    """

    elements: int
    changed: int
    max_abs: float = 0.0
    relative: float | None = 0.0
    cosine: float | None = None
    max_ulp: int | None = None
    norms: tuple[float, float] = (0.0, 0.0)
    nans: tuple[int, int] = (0, 0)
    infinite: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class TensorChange:
    """Comparison of one tensor that both sides have.

    Attributes:
        name: Name without prefixes of wrappers.
        part: model, optimizer or other.
        shapes: Shape on each side.
        dtypes: Dtype on each side.
        measures: Distances; None if shapes differ or bytes cannot be read.
        is_equal: Whether every bit is the same; None if unknown.
        why: Reason for missing measures.
    """

    name: str
    part: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    measures: Measures | None = None
    is_equal: bool | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of comparing two checkpoints.

    Attributes:
        fields: Fields that differ.
        same_fields: Number of equal fields, by section.
        history: Number of entries of each log, and number of equal first entries.
        random: Comparison of each generator of either side.
        tensors: Tensors that both sides have, with the most different tensor first.
        only: Tensors that only one side has; first the tensors of ``a``, then the tensors of ``b``.
        tied: Tensors that one side stores under a second name as well.
        notes: Content that could not be compared, with reasons.
        opaque: Opaque content that differs byte for byte.
    """

    before: CheckpointView
    after: CheckpointView
    fields: tuple[FieldChange, ...]
    same_fields: Mapping[str, int]
    history: tuple[int, int, int]
    random: tuple[RandomChange, ...]
    tensors: tuple[TensorChange, ...]
    only: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
    tied: tuple[str, ...]
    notes: tuple[str, ...]
    opaque: tuple[OpaqueChange, ...] = ()

    @property
    def differs(self) -> bool:
        """True if anything differs, or could not be compared.

        Each layout has its own fields, and its own tensors besides weights and moments. Content
        that only one of the two layouts can store does not count as a difference.
        """
        is_same_layout = self.before.layout == self.after.layout
        return (
            self.before.step != self.after.step
            or any(difference.is_in == "both" or is_same_layout for difference in self.fields)
            or (len(set(self.history)) > 1 and is_same_layout)
            or any(
                difference.same is not True
                for difference in self.random
                if difference.is_in == "both" or is_same_layout
            )
            or any(tensor.is_equal is not True for tensor in self.tensors)
            or any(is_same_layout or tensor.part != OTHER for side in self.only for tensor in side)
            or bool(self.notes)
            or bool(self.opaque)
        )
