"""Parity over the files of one rank: any k of a group may be lost and are computed back.

A group is up to ``GROUP_FILES_MAX`` files of one rank and k parity files as long as its longest;
shorter files count as if zeros followed. As the code works byte by byte, damage is counted where
it is: in each chunk's place of the group any k of the files may be damaged.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError
from resilient.format.field import SHARES_MAX, add, coefficient
from resilient.format.names import is_parity_name, parity_name
from resilient.format.shard import HostFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from resilient.format.shard import Lending

CODE = "rs256"
PARITY_MAX = 16
GROUP_FILES_MAX = SHARES_MAX - PARITY_MAX


@dataclass(frozen=True, slots=True)
class ParityGroup:
    """Files that protect each other.

    Attributes:
        code: how parity is computed; ``rs256`` is :mod:`resilient.format.field`.
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


def protect(files: Sequence[Lending], groups: Iterable[ParityGroup]) -> Iterator[HostFile]:
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
            yield HostFile(name, memoryview(total))
