"""URL -> fsspec filesystem; the only module that imports fsspec.

A deadline for every request of s3fs, which has none for a server that does not say "go on".

botocore sends ``Expect: 100-continue`` with each body, and aiohttp waits for that answer without
any timeout: a server that takes the connection and is silent holds a put for ever (seen with
aiobotocore 3 and aiohttp 3; the read timeout begins to count only after the body is sent).

A URL to the filesystem of fsspec that serves it; the only module that imports fsspec.
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
    """Let each request of ``filesystem`` raise ``TimeoutError`` after ``within_seconds``.

    fsspec hands out the same filesystem for the same arguments, so one that is bound stays so.
    """
    if "_call_s3" in vars(filesystem):
        return
    call = filesystem._call_s3  # noqa: SLF001 - every request goes through it

    async def bounded(method: str, *arguments: Any, **options: Any) -> Any:
        return await asyncio.wait_for(call(method, *arguments, **options), within_seconds)

    filesystem._call_s3 = bounded  # noqa: SLF001


IN_PARTS = frozenset({"s3", "s3a"})
"""Protocols whose large objects go in parts."""
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
# A listing out of a cache would break "read your writes" between processes.
_UNCACHED = {"use_listings_cache": False}
# With the library's own defaults an endless stall is tried 25 times, for half an hour. These
# end each request after a minute and try it once: retries are RetryingStore's alone.
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


def knows_ranges(filesystem: Any, path: str) -> bool:
    """Say whether a web server sends a part of a file that is asked for, and not all of it.

    Its answer alone tells; what it sends is not read. fsspec takes the whole for the part.
    """
    return bool(sync(filesystem.loop, _is_partial, filesystem, path))


async def _is_partial(filesystem: Any, path: str) -> bool:
    session = await filesystem.set_session()
    headers = {**filesystem.kwargs.get("headers", {}), "Range": "bytes=0-0"}
    asked = {**filesystem.kwargs, "headers": headers}
    async with session.get(filesystem.encode_url(path), **asked) as answer:
        answer.raise_for_status()
        return int(answer.status) == _PARTIAL


def connect(url: str, protocol: str, given: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the filesystem of ``url`` and the path in it, with our defaults under ``given``.

    Raises:
        ConfigError: the URL is chained or malformed, or its package is not installed.
        StoreError: its server refused, or did not answer; some are not asked before they are used.
    """
    if "::" in url:
        raise ConfigError(
            f"cannot open {redacted(url)}: a chained URL puts a cache between us and the store",
            hint=f"resilient ckpt ls {shell_quote(redacted(url.rpartition('::')[2]))}",
        )
    if protocol in ("s3", "s3a"):
        # No such URL has a user, who would be taken for a part of the bucket's name.
        url = redact_userinfo(url, "")
    try:
        filesystem, root = url_to_fs(url, **merged(_OPTIONS.get(protocol, {}), given))
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        raise ConfigError(
            f"cannot open {redacted(url)}: the package for `{protocol}://` is not installed",
            hint=f"pip install 'resilient-train[{extra}]'" if extra else redacted_text(str(error)),
        ) from error
    except AttributeError as error:
        raise ConfigError(
            f"cannot open {redacted(url)}: `{protocol}://` leads on to another filesystem, which "
            "the URL does not name",
            hint="name the place itself: a folder, s3://, gs://, az:// or another store",
        ) from fit_to_show(error)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"cannot open {redacted(url)}: {redacted_text(str(error))}",
            hint="resilient ckpt ls --help",
        ) from fit_to_show(error)
    except errors_of(protocol) as error:
        # Some log in at once, and find nobody there.
        raise kind_of_foreign(error)(
            f"cannot open {redacted(url)}: {type(error).__name__}: {redacted_text(str(error))}",
            hint="nothing was changed; see that its server runs and the URL names it, then run "
            "the same command again",
        ) from fit_to_show(error)
    # s3fs repeats everything five times on top of botocore's repetitions.
    with suppress(AttributeError):
        filesystem.retries = min(filesystem.retries, 1)
    if protocol in IN_PARTS:
        timeouts = {**_S3["config_kwargs"], **filesystem.config_kwargs}
        bound_requests(filesystem, timeouts["read_timeout"])
    return filesystem, str(root)
