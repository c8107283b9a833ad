"""Which files are worth a reference, and what protects those: whole groups, or none does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from resilient.errors import ResilientError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from resilient.format.manifest import Manifest
    from resilient.format.parity import ParityGroup
    from resilient.storage.store import Store


@dataclass(frozen=True, slots=True)
class Bounds:
    """What decides whether a file is referred to, or written in part.

    Attributes:
        share_min: one in how many bytes is enough.
        lengths: bytes of the files there, by key, and of the staged ones, by name.
        tensors: how many each staged file holds.
        copies_bytes_max: memory for what is left of a staged file; None if nothing bounds it.
    """

    share_min: int
    lengths: Mapping[str, int]
    tensors: Mapping[str, int]
    copies_bytes_max: int | None

    def allow(self, name: str, taken_bytes: int, taken: int) -> bool:
        """Say whether enough of a file is referred to, and what is left of it can be copied.

        Args:
            name: of a staged file, or the key of one that is there.
            taken_bytes: that are referred to.
            taken: in how many tensors.
        """
        length, room_bytes = self.lengths[name], self.copies_bytes_max
        if taken_bytes * self.share_min < length:
            return False
        is_copied = taken < self.tensors.get(name, 0)
        return not is_copied or room_bytes is None or length - taken_bytes <= room_bytes


def groups_of_origin(manifest: Manifest) -> list[ParityGroup]:
    """Return the groups of a checkpoint with the names by which a newer one refers to them."""
    return [
        replace(
            group,
            files=tuple(manifest.key(name) for name in group.files),
            parity=tuple(manifest.key(name) for name in group.parity),
        )
        for group in manifest.parity
    ]


def is_worth(
    group: ParityGroup, wanted: Mapping[str, int], lengths: Mapping[str, int], share_min: int
) -> bool:
    """Say whether a good part of a group is needed; all of it must stay for the sake of any.

    Args:
        group: the group.
        wanted: bytes that are needed, by name of the file.
        lengths: bytes of each file.
        share_min: one in how many bytes is enough.
    """
    needed = sum(wanted.get(name, 0) for name in group.files)
    return 0 < sum(lengths[name] for name in group.files) <= share_min * needed


def is_there(store: Store, keys: Iterable[str], lengths: Mapping[str, int]) -> bool:
    """Say whether files have their full lengths; if the store does not say, they are in doubt.

    Crash: reads only.
    """
    try:
        return all(store.stat(key).size_bytes == lengths[key] for key in keys)
    except ResilientError:
        return False
