"""What is said of content that is not what was committed."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from resilient.errors import IntegrityError, KeyNotFound
from resilient.format.digest import digest_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from resilient.format.manifest import FileEntry, Manifest
    from resilient.storage.store import Store

_NAMED_MAX = 4


def damaged(manifest: Manifest, entry: FileEntry, where: str, names: list[str]) -> IntegrityError:
    """Return the error for a file whose bytes are not what they were.

    Args:
        manifest: of its checkpoint.
        entry: the file.
        where: how long it is, or which bytes of it.
        names: the tensors hit.
    """
    key, hit = manifest.key(entry.name), join_names(names)
    return IntegrityError(
        f"`{key}`: content is not what was committed ({where}{'; in ' + hit if hit else ''})",
        key=key,
        tensor=hit,
    )


@contextmanager
def missing_is_damage(store: Store, manifest: Manifest, key: str) -> Iterator[None]:
    """Inside, a file that is not there raises IntegrityError, unless its manifest is gone too.

    Rotation deletes the manifest first: gone with it is no damage.

    Crash: reads only.
    """
    try:
        yield
    except KeyNotFound as error:
        store.stat(manifest.checkpoint.manifest_key)
        raise IntegrityError(f"`{key}` is missing", key=key) from error


def tensors_hit(manifest: Manifest, file: str, data: bytes) -> list[str]:
    """Return the names of tensors whose bytes in ``file`` are not what was committed.

    Crash: reads only.
    """
    return [
        tensor.name
        for tensor in manifest.tensors
        for one in tensor.regions
        if one.file == file
        and digest_bytes(memoryview(data)[one.start : one.start + one.size_bytes]) != one.digest
    ]


def join_names(names: Sequence[str]) -> str:
    """Return the first few names, comma separated, and how many more there are."""
    more = len(names) - _NAMED_MAX
    return ", ".join(names[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
