"""Multipart uploads that nobody ended: a killed client leaves one, unseen and paid for.

What to do is said here once; who asks the server is ``s3_requests`` (beside obstore, which can
neither list nor abort uploads of others) or s3fs.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol

from resilient.storage.fs_connect import connect
from resilient.storage.fs_errors import TRUST_HINT, errors_of, is_untrusted, kind_of_foreign
from resilient.storage.urls import fit_to_show, redacted, redacted_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from resilient.clock import Clock
    from resilient.errors import StoreError


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload that was begun.

    Attributes:
        key: in the bucket.
        number: the server's name for it.
        begun: when, by the server's clock.
    """

    key: str
    number: str
    begun: datetime


class Uploads(Protocol):
    """The unfinished uploads of a bucket."""

    def under(self, prefix: str) -> Iterator[Upload]:
        """Yield those whose key begins with ``prefix``."""

    def abort(self, upload: Upload) -> None:
        """Forget one with all its parts; one that is gone is no error."""


def abort_uploads(
    uploads: Uploads,
    prefix: str,
    is_ours: Callable[[str], bool],
    older_than_seconds: float,
    clock: Clock,
) -> tuple[str, ...]:
    """Abort the unfinished uploads under ``prefix`` that are ours and old; return their keys.

    An upload that is still going on and is aborted fails with its next part; nothing that was
    ever visible is touched.

    Args:
        uploads: of the bucket.
        prefix: the store's root in it, empty or ending with ``/``.
        is_ours: says of a key, relative to the store's root, whether its upload may go.
        older_than_seconds: since the upload was begun, by the server's clock.
        clock: for the present time.

    Raises:
        StoreError: the server refused, or did not answer.
    """
    latest = datetime.fromisoformat(clock.now_iso()) - timedelta(seconds=older_than_seconds)
    doomed = [
        one
        for one in uploads.under(prefix)
        if one.begun <= latest and is_ours(one.key.removeprefix(prefix))
    ]
    for one in doomed:
        uploads.abort(one)
    return tuple(one.key.removeprefix(prefix) for one in doomed)


def abort_through_s3fs(
    url: str,
    arguments: Mapping[str, Any],
    is_ours: Callable[[str], bool],
    older_than_seconds: float,
    clock: Clock,
) -> tuple[str, ...]:
    """Do the same with s3fs, which finds credentials in more places than we do.

    Args:
        url: of the store, ``s3://bucket/prefix``.
        arguments: of s3fs.
        is_ours: as above.
        older_than_seconds: as above.
        clock: as above.

    Raises:
        ConfigError: s3fs is not installed.
        StoreError: the server refused, or did not answer.
    """
    filesystem, root = connect(url, "s3", arguments)
    bucket, _, prefix = root.strip("/").partition("/")
    start = f"{prefix}/" if prefix else ""
    try:
        return abort_uploads(
            _S3fsUploads(filesystem, bucket), start, is_ours, older_than_seconds, clock
        )
    except errors_of("s3") as error:
        raise cannot_clean(
            url, kind_of_foreign(error), f"{type(error).__name__}: {error}"
        ) from fit_to_show(error)


def cannot_clean(url: str, kind: type[StoreError], reason: str) -> StoreError:
    """Return the error of a server that lets nobody list or abort uploads."""
    return kind(
        f"cannot clean up unfinished uploads in {redacted(url)}: {redacted_text(reason)}",
        hint=TRUST_HINT
        if is_untrusted(reason)
        else "let a lifecycle rule of the bucket abort incomplete multipart uploads",
    )


class _S3fsUploads:
    """The uploads of a bucket, through s3fs."""

    def __init__(self, filesystem: Any, bucket: str) -> None:
        self._filesystem, self._bucket = filesystem, bucket

    def under(self, prefix: str) -> Iterator[Upload]:
        """Ask for page after page."""
        markers: dict[str, str] = {}
        while True:
            page = self._filesystem.call_s3(
                "list_multipart_uploads", Bucket=self._bucket, Prefix=prefix, **markers
            )
            for one in page.get("Uploads", ()):
                yield Upload(one["Key"], one["UploadId"], one["Initiated"])
            if not page.get("IsTruncated"):
                return
            markers = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }

    def abort(self, upload: Upload) -> None:
        """Abort one; another life may have done so."""
        try:
            self._filesystem.call_s3(
                "abort_multipart_upload",
                Bucket=self._bucket,
                Key=upload.key,
                UploadId=upload.number,
            )
        except FileNotFoundError:
            return
