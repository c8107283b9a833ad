"""Creation of the fsspec filesystem for a URL, with a deadline for each request.

Only this module imports fsspec.

The deadline is needed because a put of s3fs can block forever. The library botocore below s3fs
sends ``Expect: 100-continue`` with each body. The library aiohttp then waits for the answer ``100
Continue`` without a timeout. A server may accept the connection and never answer. We observed such
a block with aiobotocore 3 and aiohttp 3, whose read timeout starts only after the body is sent.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fsspec.asyn import sync
from fsspec.core import url_to_fs

from resilient.errors import ConfigError
from resilient.redaction import redact_userinfo, shell_quote
from resilient.storage.errors import errors_of, kind_of_foreign
from resilient.storage.options import merged
from resilient.storage.urls import fit_to_show, redacted, redacted_text

if TYPE_CHECKING:
    from collections.abc import Mapping


def bound_requests(filesystem: Any, within_seconds: float) -> None:
    """Make each request of ``filesystem`` raise ``TimeoutError`` after ``within_seconds``.

    fsspec returns the same filesystem for the same arguments, so the first deadline remains in
    effect.
    """
    if "_call_s3" in vars(filesystem):
        return
    call = filesystem._call_s3  # noqa: SLF001 - every request goes through it

    async def bounded(method: str, *arguments: Any, **options: Any) -> Any:
        return await asyncio.wait_for(call(method, *arguments, **options), within_seconds)

    filesystem._call_s3 = bounded  # noqa: SLF001


MULTIPART_PROTOCOLS = frozenset({"s3", "s3a"})
"""Protocols whose large objects are sent in parts."""
_PARTIAL = 206
_EXTRAS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
}
# A cached listing would break "read your writes" between processes.
_UNCACHED = {"use_listings_cache": False}
# With the library's defaults, a permanent stall is retried 25 times, for half an hour. These
# options end each request after a minute and try it once: only RetryingStore retries.
_S3: dict[str, Any] = {
    **_UNCACHED,
    "config_kwargs": {
        "connect_timeout": 5,
        "read_timeout": 60,
        "retries": {"mode": "standard", "total_max_attempts": 1},
    },
}
_OPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("s3", "s3a"), _S3),
    **dict.fromkeys(("gs", "gcs", "az", "abfs", "abfss", "http", "https", "hf"), _UNCACHED),
}


def supports_ranges(filesystem: Any, path: str) -> bool:
    """Return whether a web server honours a range request, instead of sending the whole file.

    Only the status of the response is read, not its body. fsspec would treat the whole file as the
    requested range.
    """
    return bool(sync(filesystem.loop, _is_partial, filesystem, path))


async def _is_partial(filesystem: Any, path: str) -> bool:
    session = await filesystem.set_session()
    headers = {**filesystem.kwargs.get("headers", {}), "Range": "bytes=0-0"}
    options = {**filesystem.kwargs, "headers": headers}
    async with session.get(filesystem.encode_url(path), **options) as response:
        response.raise_for_status()
        return int(response.status) == _PARTIAL


def connect(url: str, protocol: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the filesystem of ``url`` and the path in it, with our defaults under ``options``.

    Raises:
        ConfigError: The URL is chained or malformed, or its package is not installed.
        StoreError: The server refused or did not answer. Some servers are contacted only on first
            use.
    """
    if "::" in url:
        raise ConfigError(
            f"cannot open {redacted(url)}: a chained URL puts a cache in front of the store",
            hint=f"resilient ckpt ls {shell_quote(redacted(url.rpartition('::')[2]))}",
        )
    if protocol in ("s3", "s3a"):
        # An S3 URL has no user; the user would be taken for a part of the bucket's name.
        url = redact_userinfo(url, "")
    try:
        filesystem, root = url_to_fs(url, **merged(_OPTIONS.get(protocol, {}), options))
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        raise ConfigError(
            f"cannot open {redacted(url)}: the package for `{protocol}://` is not installed",
            hint=f"pip install 'resilient-train[{extra}]'" if extra else redacted_text(str(error)),
        ) from error
    except AttributeError as error:
        raise ConfigError(
            f"cannot open {redacted(url)}: `{protocol}://` leads to another filesystem, which the "
            "URL does not name",
            hint="use the URL of the store itself: a folder, s3://, gs://, az:// or another store",
        ) from fit_to_show(error)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"cannot open {redacted(url)}: {redacted_text(str(error))}",
            hint="resilient ckpt ls --help",
        ) from fit_to_show(error)
    except errors_of(protocol) as error:
        # Some filesystems log in at once, and may reach no server.
        raise kind_of_foreign(error)(
            f"cannot open {redacted(url)}: {type(error).__name__}: {redacted_text(str(error))}",
            hint="nothing was changed; check that its server runs and that the URL is right, then "
            "run the same command again",
        ) from fit_to_show(error)
    # s3fs retries everything five times on top of botocore's retries.
    with suppress(AttributeError):
        filesystem.retries = min(filesystem.retries, 1)
    if protocol in MULTIPART_PROTOCOLS:
        timeouts = {**_S3["config_kwargs"], **filesystem.config_kwargs}
        bound_requests(filesystem, timeouts["read_timeout"])
    return filesystem, str(root)
