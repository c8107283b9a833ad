"""Reed-Solomon parity groups over GF(256).

Arithmetic of bytes for parity: the field GF(256), and a code whose first row is plain XOR.

Addition is XOR; multiplication is that of polynomials over GF(2) modulo x^8+x^4+x^3+x^2+1
(0x11D, as in RAID-6 and most Reed-Solomon codes). The code is systematic: byte ``p`` of parity row
``i`` is the sum over the group's files ``j`` of ``coefficient(i, j)`` times their byte ``p``. The
coefficients are a Cauchy matrix with its columns scaled so that row 0 is all ones, and every
square part of such a matrix can be inverted: so any ``k`` losses can be solved for.

Parity over the files of one rank: any k of a group may be lost and are computed back.

A group is up to ``GROUP_FILES_MAX`` files of one rank and k parity files as long as its longest;
shorter files count as if zeros followed. As the code works byte by byte, damage is counted where
it is: in each chunk's place of the group any k of the files may be damaged.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError
from resilient.format.keys import is_parity_name, parity_name
from resilient.format.safetensors_file import StagedFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from resilient.format.safetensors_file import FileContent

    Matrix = list[list[int]]
    Bytes = bytes | bytearray | memoryview

POLYNOMIAL = 0x11D
SHARES_MAX = 256
"""Files and parity rows of one group together; the field has no more elements."""

_BLOCK_BYTES = 1 << 18


def _exponents() -> list[int]:
    powers, value = [], 1
    for _ in range(255):
        powers.append(value)
        value <<= 1
        value ^= POLYNOMIAL if value > 0xFF else 0  # noqa: PLR2004 - a byte
    return powers * 2


_EXP = _exponents()
_LOG = {value: power for power, value in enumerate(_EXP[:255])}


def multiply(one: int, other: int) -> int:
    """Return the product of two bytes."""
    return _EXP[_LOG[one] + _LOG[other]] if one and other else 0


def invert(value: int) -> int:
    """Return what ``value``, not 0, must be multiplied with to give 1."""
    return _EXP[255 - _LOG[value]]


def coefficient(row: int, column: int) -> int:
    """Return what parity row ``row`` multiplies file ``column`` of its group with.

    Together fewer than ``SHARES_MAX`` rows and columns, or it divides by 0.
    """
    return multiply(255 ^ column, invert((255 - row) ^ column))


def solve(lost: Sequence[int], rows: Sequence[int]) -> Matrix:
    """Return how to compute lost files of a group from the sums of as many parity rows.

    The sum of a row is its parity plus the row's coefficients times the files that are there.

    Args:
        lost: the columns that are lost, each once.
        rows: as many parity rows, each once.

    Returns:
        For each lost column, in order, the factors of the rows' sums, in order.
    """
    assert len(lost) == len(rows), "as many unknowns as equations"  # noqa: S101
    return _inverted([[coefficient(row, column) for column in lost] for row in rows])


def add(total: bytearray, terms: Sequence[tuple[int, Bytes]]) -> None:
    """Add to the head of ``total``, in place, the sum of (factor, bytes), none longer."""
    import numpy as np

    sums = np.frombuffer(total, np.uint8)
    # In pieces that stay in the processor's cache until all terms are in.
    for start in range(0, len(total), _BLOCK_BYTES):
        for factor, data in terms:
            piece = memoryview(data)[start : start + _BLOCK_BYTES]
            if not factor or not len(piece):
                continue
            term = piece if factor == 1 else bytes(piece).translate(_products(factor))
            head = sums[start : start + len(piece)]
            np.bitwise_xor(head, np.frombuffer(term, np.uint8), out=head)


@lru_cache(SHARES_MAX)
def _products(factor: int) -> bytes:
    return bytes(multiply(factor, value) for value in range(256))


def _inverted(matrix: Matrix) -> Matrix:
    """Return the inverse of a small square matrix, by Gauss and Jordan."""
    size = len(matrix)
    work = [[*line, *(int(at == own) for at in range(size))] for own, line in enumerate(matrix)]
    for step in range(size):
        pivot = next(at for at in range(step, size) if work[at][step])
        work[step], work[pivot] = work[pivot], work[step]
        scale = invert(work[step][step])
        work[step] = [multiply(scale, value) for value in work[step]]
        for at in range(size):
            if at != step:
                work[at] = _reduced(work[at], work[at][step], work[step])
    return [line[size:] for line in work]


def _reduced(line: list[int], factor: int, by: list[int]) -> Any:
    return [value ^ multiply(factor, other) for value, other in zip(line, by, strict=True)]


CODE = "rs256"
PARITY_MAX = 16
GROUP_FILES_MAX = SHARES_MAX - PARITY_MAX


@dataclass(frozen=True, slots=True)
class ParityGroup:
    """Files that protect each other.

    Attributes:
        code: how parity is computed; ``rs256`` is :mod:`resilient.format.parity`.
        files: names of the files that are protected, in the order of the code's columns.
        parity: names of the parity files, in the order of the code's rows.
    """

    code: str
    files: tuple[str, ...]
    parity: tuple[str, ...]

    @property
    def shares(self) -> tuple[str, ...]:
        """All files of the group: first what is protected, then the parity."""
        return (*self.files, *self.parity)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able value."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> ParityGroup:
        """Return the group that ``to_json`` described; its names are checked by the manifest."""
        return ParityGroup(value["code"], tuple(value["files"]), tuple(value["parity"]))


def check_parity(count: object) -> int:
    """Return how many losses a group shall survive, or refuse the number.

    Raises:
        ConfigError: it is no whole number from 0 to ``PARITY_MAX``.
    """
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= PARITY_MAX:
        raise ConfigError(
            f"parity {count!r} is not accepted: use a whole number from 0 to {PARITY_MAX}",
            hint="1 survives the loss of any one file of a rank, and costs its longest file",
        )
    return count


def check_groups(groups: Sequence[ParityGroup], sizes: Mapping[str, int]) -> None:
    """Hold the groups of a manifest against its files.

    Args:
        groups: as they were read.
        sizes: bytes by name of every file of the manifest.

    Raises:
        ValueError: they contradict each other, or no release of this version wrote them.
    """
    parity = [name for group in groups for name in group.parity]
    if sorted(parity) != sorted(name for name in sizes if is_parity_name(name)):
        raise ValueError("parity files and parity groups")
    for group in groups:
        if len(set(group.shares)) != len(group.shares):
            raise ValueError("a file is twice in a parity group")
        if group.code != CODE:
            raise ValueError(f"parity code {group.code!r}")
        if not (0 < len(group.files) <= GROUP_FILES_MAX and 0 < len(group.parity) <= PARITY_MAX):
            raise ValueError("size of a parity group")
        longest = max(sizes[name] for name in group.files)
        if any(sizes[name] != longest for name in group.parity):
            raise ValueError("length of parity")


def grouped(names: Sequence[str], rank: int, count: int) -> list[ParityGroup]:
    """Return the groups of one rank's files, with ``count`` parity files each."""
    if not count:
        return []
    starts = range(0, len(names), GROUP_FILES_MAX)
    return [
        ParityGroup(
            CODE,
            tuple(names[start : start + GROUP_FILES_MAX]),
            tuple(parity_name(number, row, rank) for row in range(count)),
        )
        for number, start in enumerate(starts)
    ]


def parity_bytes(sizes: Sequence[int], count: int) -> int:
    """Return the length of all parity files of a rank whose files have these lengths."""
    starts = range(0, len(sizes), GROUP_FILES_MAX)
    return count * sum(max(sizes[start : start + GROUP_FILES_MAX]) for start in starts)


def protect(files: Sequence[FileContent], groups: Iterable[ParityGroup]) -> Iterator[StagedFile]:
    """Yield the parity files of the groups, group by group, in the order of the manifest.

    The parity of one group is in memory at a time; what is protected is read once, file by file.

    Args:
        files: every file of the groups.
        groups: what :func:`grouped` returned for them.
    """
    named = {file.name: file for file in files}
    for group in groups:
        size_bytes = max(named[name].size_bytes for name in group.files)
        totals = [bytearray(size_bytes) for _ in group.parity]
        for column, name in enumerate(group.files):
            with named[name].lend() as content:
                data = memoryview(content).cast("B")
                for row, total in enumerate(totals):
                    add(total, [(coefficient(row, column), data)])
        for name, total in zip(group.parity, totals, strict=True):
            yield StagedFile(name, memoryview(total))
