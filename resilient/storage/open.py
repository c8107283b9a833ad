"""From a URL to a Store; the only place where a backend is chosen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from resilient.clock import SystemClock
from resilient.errors import ConfigError
from resilient.showing import quoted
from resilient.storage.local import LocalStore
from resilient.storage.retrying import RetryingStore
from resilient.storage.urls import protocol_of, redacted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.clock import Clock
    from resilient.storage.store import Store

_SYSTEM_CLOCK = SystemClock()


def open_store(
    url: str,
    *,
    clock: Clock = _SYSTEM_CLOCK,
    within_seconds: float = 60.0,
    storage_options: Mapping[str, Any] | None = None,
) -> Store:
    """Return the store at ``url``, asking again for ``within_seconds`` when it does not answer.

    Nothing is created and nothing is contacted before the first operation.

    Args:
        url: a path, a ``file:`` URL, or any URL that fsspec knows, for example ``s3://b/run``.
        clock: for the pauses between tries.
        within_seconds: how long one operation may go on trying.
        storage_options: endpoint, credentials and the like: for ``s3://`` the names in
            :mod:`resilient.storage.s3_options`, for ``gs://`` and ``az://`` in
            :mod:`resilient.storage.cloud_options`, else passed to fsspec as they are. Never
            shown, never stored.

    Raises:
        ConfigError: the URL is empty or malformed, or the package for it is not installed.
    """
    return RetryingStore(_backend(url, storage_options or {}), clock, within_seconds)


def _backend(url: str, storage_options: Mapping[str, Any]) -> Store:
    if not url.strip():
        raise ConfigError(
            "cannot open a store: its URL is empty", hint="resilient ckpt ls ./runs/example"
        )
    if protocol_of(url) == "file":
        return LocalStore(local_path(url))
    # TLS, fsspec and what they load are nothing that a command on a local folder need pay for.
    from resilient.storage.remote import open_remote

    return open_remote(url, storage_options)


def local_path(url: str) -> Path:
    """Return the folder that a plain path or a ``file:`` URL names.

    Raises:
        ConfigError: the URL names another machine.
    """
    if not url.lower().startswith("file:"):
        return Path(url).expanduser()
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        meant = f"file:///{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise ConfigError(
            f"cannot open {redacted(url)}: `{parts.netloc.rpartition('@')[2]}` is read as a "
            "machine's name, and a local path has none",
            hint=f"resilient ckpt ls {quoted(meant)}",
        )
    return Path(unquote(parts.path))
