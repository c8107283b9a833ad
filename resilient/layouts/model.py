"""What is known of a checkpoint that another tool wrote; values that its reader fills in."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.format.regions import Region

MODEL, OPTIMIZER, OTHER = "model", "optimizer", "other"
"""The parts that tensors are told apart by."""

ITEM_BITS: Mapping[str, int] = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "C128": 128, "C32": 32,
    "F32": 32, "I32": 32, "U32": 32,
    "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "U8": 8, "I8": 8, "BOOL": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
"""Bits per element by the names of safetensors, which name every dtype here."""


class Unreadable(Exception):
    """A file cannot be read as what it should be; the message says why, in plain words."""


class StorageFormat(Enum):
    """What is found where a piece of a tensor begins."""

    BYTES = "bytes"
    """Its elements."""
    MEMBER = "member"
    """The local header of a zip's member, which says where its content begins."""
    ARCHIVE = "archive"
    """A whole file of torch's, whose value is this piece."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a box of a tensor lies; what it costs to look into a file is left to who reads it.

    Attributes:
        region: the box, in the tensor as it was before it was cut up.
        file: the file.
        start: where in the file what ``form`` says begins, in bytes.
        size_bytes: how long that is at most, headers not counted.
        form: what is there.
        first: the element of it that is the box's first.
        strides: elements between neighbours along each axis; None: row-major.
        is_swapped: whether its numbers are big-endian.
    """

    region: Region
    file: str
    start: int
    size_bytes: int
    form: StorageFormat = StorageFormat.BYTES
    first: int = 0
    strides: tuple[int, ...] | None = None
    is_swapped: bool = False


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as it was before it was cut up.

    Attributes:
        name: as its tool names it; of optimizers ``state.0.exp_avg``.
        part: :data:`MODEL`, :data:`OPTIMIZER` or :data:`OTHER`.
        dtype: a name of :data:`ITEM_BITS`, or what its tool says where there is none.
        shape: elements per axis.
        files: where its bytes are.
        pieces: boxes that make it whole; none where its tool keeps it in a way of its own.
    """

    name: str
    part: str
    dtype: str
    shape: tuple[int, ...]
    files: tuple[str, ...] = ()
    pieces: tuple[Piece, ...] = ()

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of its data."""
        return (self.elements * ITEM_BITS.get(self.dtype, 0) + 7) // 8


class Remedy(Enum):
    """What there is against a problem."""

    REPAIR = "repair"
    """A repair: its plan says what can be made whole, and what cannot."""
    COPY = "copy"
    """Another copy of the checkpoint: nothing in it, and beside it, knows better."""
    EARLIER = "earlier"
    """A step before: it was saved like that."""
    UNKEPT = "unkept"
    """Nothing: its tool, or its script, never saved it."""
    NEEDLESS = "needless"
    """Nothing is needed: no resume reads it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is missing, broken or in contradiction.

    Attributes:
        place: the file, or the folder itself.
        what: what is wrong.
        loses: what training would go on without; empty when nothing follows for a resume.
        is_fatal: whether nothing can go on from here.
        help: the command that helps, with ``{path}`` in place of where the checkpoint is.
        cure: what there is against it, where no command of its own is named.
    """

    place: str
    what: str
    loses: str = ""
    is_fatal: bool = False
    help: str = ""
    cure: Remedy = Remedy.REPAIR

    @property
    def severity(self) -> str:
        """Return ``error`` if nothing can go on from here, ``warning`` of a loss, or ``note``."""
        return "error" if self.is_fatal else "warning" if self.loses else "note"


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer's state in numbers.

    Attributes:
        step: updates it made, None where it does not say.
        states: parameters with a state.
        params: parameters in its groups.
        groups: parameter groups.
        rates: learning rate of each group.
        slots: what is kept for a parameter, for example ``exp_avg``.
    """

    step: int | None
    states: int
    params: int
    groups: int
    rates: tuple[float, ...] = ()
    slots: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Schedule:
    """Where the learning-rate schedule is.

    Attributes:
        step: its last step; None of a schedule that counts evaluations.
        rates: the rates it set.
        evaluations: Evaluations that it has seen, of one that goes by a metric.
    """

    step: int | None
    rates: tuple[float, ...] = ()
    evaluations: int | None = None


@dataclass(frozen=True, slots=True)
class RandomStates:
    """Whose random numbers go on.

    Attributes:
        ranks: ranks whose states are there.
        kinds: generators of the first of them: ``python``, ``numpy``, ``cpu``, ``cuda``.
    """

    ranks: tuple[int, ...]
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Contents:
    """What one checkpoint of another tool holds.

    Attributes:
        layout: its short name, for programs.
        title: its name for people.
        resume: how its own tool goes on from it, with ``{path}`` in place of where it is.
        step: optimizer steps that were made.
        epoch: passes over the data, with the fraction of the present one.
        world: how many ranks wrote it, None where it does not say.
        data: where in the data it is, in the tool's own terms.
        versions: versions of software and formats that it names.
        facts: what else is worth a line.
        problems: what is missing, broken or in contradiction.
        not_imported: Reasons why our own Trainer does not import it though its tool resumes it.
    """

    layout: str
    title: str
    resume: str = ""
    tensors: tuple[Tensor, ...] = ()
    step: int | None = None
    epoch: float | None = None
    world: int | None = None
    optimizer: Optimizer | None = None
    schedule: Schedule | None = None
    rng: RandomStates | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    not_imported: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Resumability:
    """Answer to the question if training can continue from a checkpoint.

    Attributes:
        answer: ``yes``, ``partly`` or ``no``.
        why: Losses of ``partly``, or reasons of ``no``.
        command: Command to run next; empty if nothing helps.
    """

    answer: str
    why: tuple[str, ...] = ()
    command: str = ""

    @property
    def lost(self) -> tuple[str, ...]:
        """What a resume loses."""
        return self.why if self.answer == "partly" else ()

    def line(self) -> str:
        """Return the verdict in words."""
        told = "; ".join(self.why)
        if self.answer == "no":
            return f"not resumable because {told}"
        return f"resumable with loss of {told}" if self.why else "resumable"
