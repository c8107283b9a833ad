"""From the URL of another machine's storage to a Store: which client, and its options."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError
from resilient.storage.cloud_options import for_cloud
from resilient.storage.parts import Parts
from resilient.storage.s3_options import for_s3fs, read_s3_options, trusted
from resilient.storage.urls import protocol_of, require_plain_host

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.storage.s3_options import S3Options
    from resilient.storage.store import Store


def open_remote(url: str, storage_options: Mapping[str, Any]) -> Store:
    """Return the store at a URL that is no local path; nothing is contacted.

    Raises:
        ConfigError: the URL or an option is malformed, or the package for it is not installed.
    """
    require_plain_host(url)
    if protocol_of(url) in ("s3", "s3a") and "::" not in url:
        return _s3(url, read_s3_options(storage_options))
    # It loads fsspec, which obstore does without.
    from resilient.storage.fs import FsspecStore

    return FsspecStore(url, **for_cloud(protocol_of(url), storage_options))


def _s3(url: str, options: S3Options) -> Store:
    """Return the store of the client that was asked for, else of the fastest one that is there."""
    if options.client == "s3fs" or options.for_s3fs or not _has_obstore(options.client):
        from resilient.storage.fs import FsspecStore

        # Its own error would come with the first request, and look like a server that is away.
        trusted(options)
        return FsspecStore(url, options.parts(Parts().part_bytes), **for_s3fs(options))
    from resilient.storage.obstore import ObstoreStore

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
