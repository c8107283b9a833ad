"""A checkpoint as what another can be held against, and what is found when it is."""

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
"""What fields are told apart by, in the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class RngState:
    """A generator's state.

    Attributes:
        words: the block of a Mersenne Twister, little-endian u32; empty of any other generator.
        position: how many words of the block were drawn; of Philox its offset.
        rest: whatever else makes a difference to what comes next, such as a cached normal.
        seed: of Philox.
    """

    words: bytes
    position: int
    rest: bytes = b""
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """One of two checkpoints.

    Attributes:
        url: where it is, without secrets.
        layout: the short name of whose it is; of our own ``resilient``.
        name: what it is called there.
        step: optimizer steps that were made.
        world: how many ranks wrote it.
        folder: where its files are read.
        listing: its files.
        tensors: all of them, each whole.
        fields: plain values by section and by name.
        random: states of generators, by rank and kind.
        rates: learning rates that it goes on with.
        order: names of the parameters by their position in the optimizer, where that is known.
        history: what was logged, in order.
        notes: what of it cannot be compared, and why.
        opaque: returns what no reader understands, by its place, and what could not be read of it.
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
    """What is told of it alone: its digest, and whether another number of ranks makes another."""

    digest: bytes
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class OpaqueChange:
    """What no reader understands and is not the same, byte for byte; ``is_in`` as of a field."""

    place: str
    is_in: str = "both"


@dataclass(frozen=True, slots=True)
class FieldChange:
    """A field that is not the same; ``is_in`` says of which side it is where one lacks it."""

    section: str
    name: str
    before: Any
    after: Any
    is_in: str = "both"


@dataclass(frozen=True, slots=True)
class RandomChange:
    """Generators of one kind on one rank.

    Attributes:
        rank: whose.
        kind: ``python``, ``numpy``, ``cpu`` or ``cuda 0``.
        same: whether the next draws are the same; None where one side has none.
        draws: how many words the second is ahead of the first in one stream (negative: behind);
            None where it is not the same stream, or farther than was looked.
        is_in: ``both``, ``a`` or ``b``.
    """

    rank: int
    kind: str
    same: bool | None
    draws: int | None = None
    is_in: str = "both"


@dataclass(frozen=True, slots=True)
class Measures:
    """How far two tensors are from each other.

    Differences are of values; where both have one dtype, equality is of bits. What is no finite
    number on either side is left out of distances and counted.

    Attributes:
        elements: how many there are.
        changed: elements that are not the same: other bits, or with two dtypes another value.
        max_abs: largest distance.
        relative: L2 norm of the difference over that of the first; None from zero.
        cosine: between the two; None if one is zero.
        max_ulp: largest distance in representable numbers; None of integers and of two dtypes.
        norms: L2 norm of each.
        nans: how many elements of each are no number.
        infinite: how many elements of each are infinite.
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
    """One tensor on both sides.

    Attributes:
        name: without what wrappers put before it.
        part: model, optimizer or other.
        shapes: on each side.
        dtypes: on each side.
        measures: None where shapes differ, or bytes cannot be read.
        is_equal: whether every bit is the same; None where it is not known.
        why: why there are no measures.
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
    """Everything that was found.

    Attributes:
        fields: those that are not the same.
        same_fields: how many are, by section.
        history: entries of each log, and how many of the first ones are the same.
        random: every generator of either side.
        tensors: every tensor of both sides, the most different first.
        only: names of tensors that one side has, with their part; first ``a``'s, then ``b``'s.
        tied: tensors that one side keeps under a second name as well.
        notes: what could not be compared, and why.
        opaque: what no reader understands, and is not the same byte for byte.
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
        """Whether anything is not the same, or could not be seen to be.

        Two layouts have fields of their own, and tensors that are neither weights nor moments:
        what only one of them speaks of is no difference.
        """
        ours = self.before.layout == self.after.layout
        return (
            self.before.step != self.after.step
            or any(one.is_in == "both" or ours for one in self.fields)
            or (len(set(self.history)) > 1 and ours)
            or any(one.same is not True for one in self.random if one.is_in == "both" or ours)
            or any(one.is_equal is not True for one in self.tensors)
            or any(ours or one.part != OTHER for side in self.only for one in side)
            or bool(self.notes)
            or bool(self.opaque)
        )
