"""Digests of staged regions, and which of them need none because they changed for certain."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from resilient.format.digest import digest_bytes, digest_slowly, nobody

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from resilient.format.manifest import StoredRegion
    from resilient.format.regions import Region
    from resilient.format.shard import HostFile

_GLIMPSE_BYTES = 4096


class Glimpses:
    """Remembers a few bytes of every region that a rank staged last.

    Where they differ the region has changed, so it is not digested only to find that out: a
    save of state that is all trained costs no second pass over it. Where they are the same
    the digest decides. So this spares work and never changes what is referred to wrongly.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, Region], str] = {}

    def changed(self, file: HostFile) -> set[int]:
        """Return where regions begin in ``file`` that are not what they were; remember all."""
        data, found = memoryview(file.data), set()
        for tensor in file.tensors:
            for one in tensor.regions:
                glimpse = digest_bytes(_few(data, one))
                if self._seen.get((tensor.name, one.region), glimpse) != glimpse:
                    found.add(one.start)
                self._seen[tensor.name, one.region] = glimpse
        return found


def _few(data: memoryview, one: StoredRegion) -> bytes:
    """Return bytes from the start, the middle and the end of a region."""
    last = max(one.size_bytes - _GLIMPSE_BYTES, 0)
    places = (one.start + offset for offset in (0, last // 2, last))
    length = min(one.size_bytes, _GLIMPSE_BYTES)
    return b"".join(data[start : start + length] for start in places)


def digested(
    file: HostFile, changed: Collection[int] = (), told: Callable[[int], None] = nobody
) -> HostFile:
    """Return the file with the digest of each region's own bytes, where there is none yet.

    Args:
        file: as it was staged.
        changed: where regions begin that need none.
        told: told of each piece's length when it is done, and may take its time.
    """
    data = memoryview(file.data)

    def proved(one: StoredRegion) -> StoredRegion:
        if one.digest or one.start in changed:
            return one
        content = data[one.start : one.start + one.size_bytes]
        return replace(one, digest=digest_slowly(content, told))

    return replace(
        file,
        tensors=tuple(
            replace(tensor, regions=tuple(map(proved, tensor.regions))) for tensor in file.tensors
        ),
    )
