"""Reed-Solomon parity over GF(256), which reconstructs lost or damaged checkpoint files.

A group has up to ``GROUP_FILES_MAX`` checkpoint files of one rank, and k parity files. Each parity
file is as long as the longest checkpoint file of the group. The computation pads shorter files with
zeros. Any k files of a group can be reconstructed from the others. Each byte position is a separate
code word. Damage can therefore be in k files at one position, and in k other files at another
position.

Addition is XOR. Multiplication is that of polynomials over GF(2) modulo x^8+x^4+x^3+x^2+1 (0x11D,
as in RAID-6 and most Reed-Solomon codes). The code is systematic. Byte ``p`` of parity row ``i`` is
a sum over the group's files ``j``. Each term is ``coefficient(i, j)`` times byte ``p`` of the file.
The coefficients are a Cauchy matrix whose columns are scaled so that row 0 is all ones (plain XOR).
Every square submatrix of such a matrix is invertible, so any ``k`` losses have a solution.
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
"""Maximum number of files and parity rows of one group; the field has no more elements."""

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


def multiply(left: int, right: int) -> int:
    """Return the product of two bytes."""
    return _EXP[_LOG[left] + _LOG[right]] if left and right else 0


def invert(value: int) -> int:
    """Return the multiplicative inverse of ``value``, which is not 0."""
    return _EXP[255 - _LOG[value]]


def coefficient(row: int, column: int) -> int:
    """Return the factor of file ``column`` of a group in parity row ``row``.

    The numbers of rows and columns together must be below ``SHARES_MAX``, to avoid a division by 0.
    """
    return multiply(255 ^ column, invert((255 - row) ^ column))


def solve(lost: Sequence[int], rows: Sequence[int]) -> Matrix:
    """Return the factors that reconstruct lost files from the sums of as many parity rows.

    The sum of a row is its parity plus the row's coefficients times the available files.

    Args:
        lost: Lost columns, each once.
        rows: As many parity rows, each once.

    Returns:
        For each lost column, in order, the factors of the rows' sums, in order.
    """
    assert len(lost) == len(rows), "as many unknowns as equations"  # noqa: S101
    return _inverted([[coefficient(row, column) for column in lost] for row in rows])


def add(total: bytearray, terms: Sequence[tuple[int, Bytes]]) -> None:
    """Add factor times bytes of each term to the beginning of ``total``, in place."""
    import numpy as np

    sums = np.frombuffer(total, np.uint8)
    # Work in blocks that stay in the processor's cache until all terms are added.
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
    """Return the inverse of a small square matrix, by Gauss-Jordan elimination."""
    size = len(matrix)
    work = [[*line, *(int(at == row) for at in range(size))] for row, line in enumerate(matrix)]
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
    return [
        value ^ multiply(factor, pivot_value) for value, pivot_value in zip(line, by, strict=True)
    ]


CODE = "rs256"
PARITY_MAX = 16
GROUP_FILES_MAX = SHARES_MAX - PARITY_MAX


@dataclass(frozen=True, slots=True)
class ParityGroup:
    """Files that protect each other.

    Attributes:
        code: Name of the code; ``rs256`` is :mod:`resilient.format.parity`.
        files: Names of the protected files, in the order of the code's columns.
        parity: Names of the parity files, in the order of the code's rows.
    """

    code: str
    files: tuple[str, ...]
    parity: tuple[str, ...]

    @property
    def shares(self) -> tuple[str, ...]:
        """All files of the group: first the protected files, then the parity files."""
        return (*self.files, *self.parity)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able value."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> ParityGroup:
        """Parse the output of ``to_json``; the manifest checks the names."""
        return ParityGroup(value["code"], tuple(value["files"]), tuple(value["parity"]))


def check_parity(count: object) -> int:
    """Return the number of lost files that a group can reconstruct, or reject the number.

    Raises:
        ConfigError: ``count`` is not a whole number from 0 to ``PARITY_MAX``.
    """
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= PARITY_MAX:
        raise ConfigError(
            f"parity {count!r} is not accepted: use a whole number from 0 to {PARITY_MAX}",
            hint="1 survives the loss of any one file of a rank, and costs the size of its longest "
            "file",
        )
    return count


def check_groups(groups: Sequence[ParityGroup], sizes: Mapping[str, int]) -> None:
    """Check the groups of a manifest against its files.

    Args:
        groups: Groups as read.
        sizes: Bytes of every file of the manifest, by name.

    Raises:
        ValueError: The groups contradict each other, or no release of this version wrote them.
    """
    parity = [name for group in groups for name in group.parity]
    if sorted(parity) != sorted(name for name in sizes if is_parity_name(name)):
        raise ValueError("parity files and parity groups")
    for group in groups:
        if len(set(group.shares)) != len(group.shares):
            raise ValueError("a file appears twice in a parity group")
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
    """Return the total length of a rank's parity files, from the lengths of its files."""
    starts = range(0, len(sizes), GROUP_FILES_MAX)
    return count * sum(max(sizes[start : start + GROUP_FILES_MAX]) for start in starts)


def protect(files: Sequence[FileContent], groups: Iterable[ParityGroup]) -> Iterator[StagedFile]:
    """Yield the parity files of the groups, group by group, in the order of the manifest.

    Only the parity of one group is in memory at a time. Each protected file is read once.

    Args:
        files: Every file of the groups.
        groups: Result of :func:`grouped` for these files.
    """
    file_by_name = {file.name: file for file in files}
    for group in groups:
        size_bytes = max(file_by_name[name].size_bytes for name in group.files)
        totals = [bytearray(size_bytes) for _ in group.parity]
        for column, name in enumerate(group.files):
            with file_by_name[name].lend() as content:
                data = memoryview(content).cast("B")
                for row, total in enumerate(totals):
                    add(total, [(coefficient(row, column), data)])
        for name, total in zip(group.parity, totals, strict=True):
            yield StagedFile(name, memoryview(total))
