"""What protects the files that a save refers to: whole groups, or it refers to others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from resilient.errors import ResilientError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from resilient.format.manifest import Manifest
    from resilient.format.parity import ParityGroup
    from resilient.storage.store import Store


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
