"""Multipart uploads that nobody ended: a killed client leaves one, unseen and paid for.

Listing and aborting uploads is not in obstore, so this goes through s3fs whichever client writes.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from resilient.storage.fs import connect
from resilient.storage.fs_errors import errors_of, kind_of_foreign
from resilient.storage.urls import redacted, redacted_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from resilient.clock import Clock


def abort_uploads(
    url: str,
    arguments: Mapping[str, Any],
    is_ours: Callable[[str], bool],
    older_than_seconds: float,
    clock: Clock,
) -> tuple[str, ...]:
    """Abort the unfinished uploads under ``url`` that are ours and old; return their keys.

    An upload that is still going on and is aborted fails with its next part; nothing that was
    ever visible is touched.

    Args:
        url: of the store, ``s3://bucket/prefix``.
        arguments: of s3fs.
        is_ours: says of a key, relative to the store's root, whether its upload may go.
        older_than_seconds: since the upload was begun, by the server's clock.
        clock: for the present time.

    Raises:
        ConfigError: s3fs is not installed.
        StoreError: the server refused, or did not answer.
    """
    filesystem, root = connect(url, "s3", arguments)
    bucket, _, prefix = root.strip("/").partition("/")
    start = f"{prefix}/" if prefix else ""
    latest = datetime.fromisoformat(clock.now_iso()) - timedelta(seconds=older_than_seconds)
    try:
        doomed = [
            one
            for one in _uploads(filesystem, bucket, start)
            if one["Initiated"] <= latest and is_ours(one["Key"].removeprefix(start))
        ]
        for one in doomed:
            filesystem.call_s3(
                "abort_multipart_upload", Bucket=bucket, Key=one["Key"], UploadId=one["UploadId"]
            )
    except errors_of("s3") as error:
        raise kind_of_foreign(error)(
            f"cannot clean up unfinished uploads in {redacted(url)}: {type(error).__name__}: "
            f"{redacted_text(str(error))}",
            hint="let a lifecycle rule of the bucket abort incomplete multipart uploads",
        ) from error
    return tuple(one["Key"].removeprefix(start) for one in doomed)


def _uploads(filesystem: Any, bucket: str, prefix: str) -> Iterator[Mapping[str, Any]]:
    markers: dict[str, str] = {}
    while True:
        page = filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **markers)
        yield from page.get("Uploads", ())
        if not page.get("IsTruncated"):
            return
        markers = {
            "KeyMarker": page["NextKeyMarker"],
            "UploadIdMarker": page["NextUploadIdMarker"],
        }
