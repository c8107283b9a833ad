"""Which filesystems of fsspec can create exclusively, and how.

A protocol is in the table only if its library was read and hands the condition to something
that decides alone. fsspec's own ``mode="create"`` is "look, then write" and decides nothing.
"""

from __future__ import annotations

import errno
import inspect
import secrets
import threading
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from resilient.storage.fs_errors import status_of

Create = Callable[[Any, str, bytes], None]
"""Writes an object or raises ``FileExistsError``, having changed nothing."""

MEMORY_LOCK = threading.RLock()
"""Held by whoever writes to ``memory://``, which is one dict per process and has no lock."""

_WRITER = "resilient-writer"
_GCS = frozenset({"gs", "gcs"})
_AZURE = frozenset({"az", "abfs", "abfss"})
_PUT_OBJECT_MAX_BYTES = 5 << 30
_CONFLICT = (409, 412)
_BOTOCORE_WITH_CONDITION = (1, 35, 20)


def create_for(protocol: str, filesystem: Any) -> Create | None:
    """Return how ``filesystem`` creates exclusively, or None if it cannot."""
    if protocol == "memory":
        return _create_in_memory
    if protocol in ("s3", "s3a") and _s3_knows_conditions(filesystem):
        return _create_on_s3
    if protocol in _GCS and _knows_mode(filesystem):
        return _create_on_gcs
    if protocol in _AZURE and "overwrite" in _parameters(filesystem):
        return _create_on_azure
    return None


def _create_in_memory(filesystem: Any, path: str, data: bytes) -> None:
    # Its ``open(path, "xb")`` looks and then writes: two threads can both pass the look.
    with MEMORY_LOCK:
        if filesystem.isfile(path):
            raise FileExistsError(errno.EEXIST, "the key is taken", path)
        try:
            filesystem.pipe_file(path, data)
        except FileExistsError as error:
            # Not this key: an object in the place of a folder on its way.
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(error)) from error


def _create_on_s3(filesystem: Any, path: str, data: bytes) -> None:
    """Put with ``If-None-Match: *``, and know our own echo.

    botocore and aiohttp send a PUT again when the connection breaks, and the second one then
    meets the first: 412, for an object that is ours. So each call marks its object with a
    token of its own and, when told that the key is taken, looks whose it is.

    A multipart upload is never used: several servers ignore the condition when completing one.
    """
    if len(data) >= _PUT_OBJECT_MAX_BYTES:
        raise OSError(errno.EFBIG, "an exclusive create on S3 is one PUT of less than 5 GiB", path)
    token = secrets.token_hex(16)
    try:
        filesystem.pipe_file(
            path,
            data,
            mode="create",
            chunksize=_PUT_OBJECT_MAX_BYTES,
            Metadata={_WRITER: token},
        )
    except OSError as error:
        if not isinstance(error, FileExistsError) and status_of(error) not in _CONFLICT:
            raise
        if _writer(filesystem, path) != token:
            raise FileExistsError(errno.EEXIST, "the key is taken", path) from error


def _create_on_gcs(filesystem: Any, path: str, data: bytes) -> None:
    """Put with ``ifGenerationMatch=0``: only if the object has no live generation.

    gcsfs tries six times whatever it is told, so a token tells our own echo here too. Its
    uploads in several requests carry the condition as well.
    """
    token = secrets.token_hex(16)
    try:
        filesystem.pipe_file(path, data, mode="create", metadata={_WRITER: token})
    except FileExistsError:
        filesystem.invalidate_cache()
        found = filesystem.info(path).get("metadata") or {}
        if found.get(_WRITER) != token:
            raise


def _create_on_azure(filesystem: Any, path: str, data: bytes) -> None:
    """Put Blob with ``If-None-Match: *``, which is what ``overwrite=False`` sends.

    Told to try once: a try that got no answer is then seen as one, and not as a key that is
    taken by somebody else.
    """
    filesystem.pipe_file(path, data, overwrite=False, retry_total=0)


def _writer(filesystem: Any, path: str) -> str:
    try:
        found: dict[str, str] = filesystem.metadata(path, refresh=True)
    except FileNotFoundError as error:
        # 409: two requests met and neither may have won. Whoever tries again finds out.
        raise OSError(errno.EAGAIN, "a conflict left no object behind", path) from error
    return {name.lower(): value for name, value in found.items()}.get(_WRITER, "")


def _s3_knows_conditions(filesystem: Any) -> bool:
    # Older versions drop the unknown argument without a word and overwrite.
    try:
        botocore = tuple(int(part) for part in version("botocore").split(".")[:3])
    except (PackageNotFoundError, ValueError):
        return False
    return botocore >= _BOTOCORE_WITH_CONDITION and _knows_mode(filesystem)


def _knows_mode(filesystem: Any) -> bool:
    return "mode" in _parameters(filesystem)


def _parameters(filesystem: Any) -> frozenset[str]:
    return frozenset(inspect.signature(filesystem._pipe_file).parameters)  # noqa: SLF001 - its API
