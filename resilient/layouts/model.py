"""Data model of another tool's checkpoint: tensors, training state, problems and resumability."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.format.regions import Region

MODEL, OPTIMIZER, OTHER = "model", "optimizer", "other"
"""Parts of a checkpoint that a tensor can belong to."""

ADAM_ALONE = frozenset({"amsgrad", "maximize", "capturable", "differentiable"})
"""Keys in the groups of torch's Adam that no other optimizer has."""

ITEM_BITS: Mapping[str, int] = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "C128": 128, "C32": 32,
    "F32": 32, "I32": 32, "U32": 32,
    "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "U8": 8, "I8": 8, "BOOL": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
"""Bits per element by dtype; all readers use the dtype names of safetensors."""


class Unreadable(Exception):
    """Error for a file without the expected format; the message has the reason."""


class StorageFormat(Enum):
    """Format of the bytes where a piece of a tensor begins."""

    BYTES = "bytes"
    """The elements themselves."""
    MEMBER = "member"
    """The local header of a zip member; the header determines the start of the content."""
    ARCHIVE = "archive"
    """A torch file that contains only this piece."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Location of a box of a tensor; a reader resolves it before a read.

    Attributes:
        region: The box within the whole tensor.
        file: Name of the file.
        start: Offset in the file at which the data of ``form`` begins, in bytes.
        size_bytes: Maximum length in bytes, without headers.
        form: Format at ``start``.
        first: Index of the box's first element in the stored data.
        strides: Elements between neighbours along each axis; None for row-major order.
        is_swapped: Whether the numbers are big-endian.
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
    """A whole tensor, whose pieces may be in the files of several ranks.

    Attributes:
        name: Name in the tool's own form, for example ``state.0.exp_avg`` in an optimizer.
        part: :data:`MODEL`, :data:`OPTIMIZER` or :data:`OTHER`.
        dtype: A name of :data:`ITEM_BITS`, or its tool's name for an unknown dtype.
        shape: Elements per axis.
        files: Files that contain bytes of the tensor.
        pieces: Boxes that cover the tensor; empty for an unknown storage form.
    """

    name: str
    part: str
    dtype: str
    shape: tuple[int, ...]
    files: tuple[str, ...] = ()
    pieces: tuple[Piece, ...] = ()

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of its data."""
        return (self.elements * ITEM_BITS.get(self.dtype, 0) + 7) // 8


class Remedy(Enum):
    """Remedy for a problem."""

    REPAIR = "repair"
    """A repair; its plan lists what it can restore."""
    COPY = "copy"
    """Another copy of the checkpoint, because no other file has the lost data."""
    EARLIER = "earlier"
    """An earlier step, because the checkpoint was saved with this problem."""
    UNKEPT = "unkept"
    """None, because the tool or the script never saves this state."""
    NEEDLESS = "needless"
    """None needed, because no resume reads the content."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Missing, broken or contradictory content of a checkpoint.

    Attributes:
        place: File with the problem, or the folder itself.
        what: Description of the problem.
        loses: State that a resume would lose; empty if it loses nothing.
        is_fatal: Whether the problem prevents a resume.
        help: Command that helps, with ``{path}`` in place of the checkpoint's path.
        cure: Remedy, if ``help`` names no command.
        tensor: Name of the damaged tensor, if the problem concerns only one tensor; else empty.
    """

    place: str
    what: str
    loses: str = ""
    is_fatal: bool = False
    help: str = ""
    cure: Remedy = Remedy.REPAIR
    tensor: str = ""

    @property
    def severity(self) -> str:
        """Return ``error`` if no resume is possible, ``warning`` for a loss, else ``note``."""
        return "error" if self.is_fatal else "warning" if self.loses else "note"


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Summary of an optimizer's state.

    Attributes:
        step: Number of updates, None if unknown.
        states: Number of parameters with a state.
        params: Number of parameters in the groups.
        groups: Number of parameter groups.
        rates: Learning rate of each group.
        slots: Names of the state per parameter, for example ``exp_avg``.
        options: Options of each group by name, as numbers, booleans and tuples of numbers; empty if
            unknown.
        fault: Reason why no step can use the state; empty without one.
        sizes: Number of parameters in each group; empty if unknown.
    """

    step: int | None
    states: int
    params: int
    groups: int
    rates: tuple[float, ...] = ()
    slots: tuple[str, ...] = ()
    options: tuple[Mapping[str, Any], ...] = ()
    fault: str = ""
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Schedule:
    """Position of a learning-rate scheduler.

    Attributes:
        step: Last step; None for a scheduler that counts evaluations.
        rates: Learning rates that the scheduler set.
        evaluations: Number of evaluations, for a scheduler that watches a metric.
        fault: Reason why no step can use the state; empty without one.
    """

    step: int | None
    rates: tuple[float, ...] = ()
    evaluations: int | None = None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class RandomStates:
    """Ranks and generators with a saved random state.

    Attributes:
        ranks: Ranks with a saved state.
        kinds: Generators of the first rank: ``python``, ``numpy``, ``cpu``, ``cuda``.
    """

    ranks: tuple[int, ...]
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of one checkpoint of another tool.

    Attributes:
        layout: Machine-readable name of the layout.
        title: Human-readable name of the layout.
        resume: Call of the tool that resumes the checkpoint, with ``{path}`` in place of its path.
        step: Number of optimizer steps.
        epoch: Number of passes over the data, including the fraction of the current pass.
        world: Number of ranks that wrote the checkpoint; None if unknown.
        data: Position in the data, in the tool's own terms.
        versions: Versions of software and formats in the checkpoint.
        facts: Other facts to display.
        problems: Missing, broken or contradictory content.
        not_imported: Reasons why our Trainer does not import the checkpoint although its tool
            resumes it.
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
    """Result of the check whether training can continue from a checkpoint.

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
        """The state that a resume loses."""
        return self.why if self.answer == "partly" else ()

    def line(self) -> str:
        """Return the verdict in words."""
        reasons = "; ".join(self.why)
        if self.answer == "no":
            return f"not resumable because {reasons}"
        return f"resumable with loss of {reasons}" if self.why else "resumable"
