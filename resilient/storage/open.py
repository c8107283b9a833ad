"""Function ``open_store``, the only place that chooses the storage backend of a URL."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from resilient.clock import SystemClock
from resilient.errors import ConfigError
from resilient.redaction import shell_quote
from resilient.storage.local import LocalStore
from resilient.storage.options import (
    for_cloud,
    for_s3fs,
    read_s3_options,
    read_trusted_certificates,
)
from resilient.storage.retry import RetryingStore
from resilient.storage.transfer import MultipartConfig
from resilient.storage.urls import protocol_of, redacted, require_plain_host

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.clock import Clock
    from resilient.storage.options import S3Options
    from resilient.storage.store import Store

_SYSTEM_CLOCK = SystemClock()


def open_store(
    url: str,
    *,
    clock: Clock = _SYSTEM_CLOCK,
    within_seconds: float = 60.0,
    storage_options: Mapping[str, Any] | None = None,
) -> Store:
    """Open the store at ``url``, with retries for ``within_seconds`` if it does not answer.

    This function creates nothing, and connects to no server before the first operation.

    Args:
        url: A path, a ``file:`` URL, or any URL that fsspec knows, for example ``s3://b/run``.
        clock: Clock for the pauses between retries.
        within_seconds: Deadline for the retries of one operation.
        storage_options: Endpoint, credentials and similar options. For ``s3://``, ``gs://`` and
            ``az://`` see the names in :mod:`resilient.storage.options`. Options of other protocols
            go to fsspec unchanged. Values are never shown and never stored.

    Raises:
        ConfigError: The URL is empty or malformed, or its package is not installed.
    """
    return RetryingStore(_backend(url, storage_options or {}), clock, within_seconds)


def _backend(url: str, storage_options: Mapping[str, Any]) -> Store:
    if not url.strip():
        raise ConfigError(
            "cannot open a store: its URL is empty", hint="resilient ckpt ls ./runs/example"
        )
    if protocol_of(url) == "file":
        return LocalStore(local_path(url))
    return open_remote(url, storage_options)


def local_path(url: str) -> Path:
    """Return the folder of a plain path or a ``file:`` URL.

    Raises:
        ConfigError: The URL names another machine.
    """
    if not url.lower().startswith("file:"):
        return Path(url).expanduser()
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        file_url = f"file:///{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise ConfigError(
            f"cannot open {redacted(url)}: `{parts.netloc.rpartition('@')[2]}` is read as a host "
            "name, and a local path has none",
            hint=f"resilient ckpt ls {shell_quote(file_url)}",
        )
    return Path(unquote(parts.path))


def local_reference(reference: str) -> str:
    """Return a reference for a resume, a ``file:`` URL as the path of its folder.

    Raises:
        ConfigError: The URL names another machine.
    """
    is_url = reference.lower().startswith("file:")
    return str(local_path(reference)) if is_url else reference


def open_remote(url: str, storage_options: Mapping[str, Any]) -> Store:
    """Open the store at a URL that is not a local path, without a request to any server.

    Raises:
        ConfigError: The URL or an option is malformed, or the URL's package is not installed.
    """
    require_plain_host(url)
    if protocol_of(url) in ("s3", "s3a") and "::" not in url:
        return _s3(url, read_s3_options(storage_options))
    # This import loads fsspec, which obstore does not need.
    from resilient.storage.fsspec_store import FsspecStore

    return FsspecStore(url, **for_cloud(protocol_of(url), storage_options))


def _s3(url: str, options: S3Options) -> Store:
    """Open the store with the requested client, or the fastest installed client."""
    if options.client == "s3fs" or options.for_s3fs or not _has_obstore(options.client):
        from resilient.storage.fsspec_store import FsspecStore

        # Check the certificates now: the client's own error would come with the first request, and
        # look like a server that is down.
        read_trusted_certificates(options)
        return FsspecStore(url, options.parts(MultipartConfig().part_bytes), **for_s3fs(options))
    from resilient.storage.s3_store import ObstoreStore

    return ObstoreStore(url, options)


def _has_obstore(client: str) -> bool:
    if find_spec("obstore") is not None:
        return True
    if client == "obstore":
        raise ConfigError(
            "storage option `client` says obstore, which is not installed",
            hint="pip install 'resilient-train[fast]'",
        )
    return False


def local_root(place: str) -> Path | None:
    """Return the folder of a path or ``file:`` URL, None for any other URL."""
    return local_path(place).resolve() if place and protocol_of(place) == "file" else None
