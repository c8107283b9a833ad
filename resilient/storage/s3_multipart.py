"""Listing and abort of multipart uploads to S3 that a killed client did not finish.

An unfinished upload is invisible, but its parts cost money. The client library obstore can neither
list nor abort uploads of other clients. This module therefore sends its requests through s3fs or
through this package's own S3 client.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol
from xml.etree import ElementTree as ET

from resilient.errors import StoreError, StoreUnavailable
from resilient.storage.errors import (
    TRUST_HINT,
    errors_of,
    is_untrusted,
    kind_of_answer,
    kind_of_foreign,
)
from resilient.storage.fsspec_connect import connect
from resilient.storage.s3_client import WIRE_ERRORS, HttpRequest, classify_timeout, field_of
from resilient.storage.urls import fit_to_show, redacted, redacted_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from resilient.clock import Clock
    from resilient.storage.s3_client import S3Connection


@dataclass(frozen=True, slots=True)
class Upload:
    """Upload that was started.

    Attributes:
        key: Key in the bucket.
        upload_id: Upload ID of the server.
        started_at: Start time, by the server's clock.
    """

    key: str
    upload_id: str
    started_at: datetime


class Uploads(Protocol):
    """The unfinished uploads of a bucket."""

    def under(self, prefix: str) -> Iterator[Upload]:
        """Yield the uploads whose key begins with ``prefix``."""

    def abort(self, upload: Upload) -> None:
        """Abort an upload and delete its parts; a missing upload is not an error."""


def abort_uploads(
    uploads: Uploads,
    prefix: str,
    is_deletable: Callable[[str], bool],
    older_than_seconds: float,
    clock: Clock,
) -> tuple[str, ...]:
    """Abort our old unfinished uploads under ``prefix`` and return their keys.

    If an upload in progress is aborted, it fails at its next part. No visible object is touched.

    Args:
        uploads: Uploads of the bucket.
        prefix: The store's root in the bucket, empty or ending with ``/``.
        is_deletable: Predicate of a key, relative to the store's root: true if its upload may be
            aborted.
        older_than_seconds: Minimum age of an upload, by the server's clock.
        clock: Source of the present time.

    Raises:
        StoreError: The server refused or did not answer.
    """
    latest = datetime.fromisoformat(clock.now_iso()) - timedelta(seconds=older_than_seconds)
    old_uploads = [
        upload
        for upload in uploads.under(prefix)
        if upload.started_at <= latest and is_deletable(upload.key.removeprefix(prefix))
    ]
    for upload in old_uploads:
        uploads.abort(upload)
    return tuple(upload.key.removeprefix(prefix) for upload in old_uploads)


def abort_through_s3fs(
    url: str,
    arguments: Mapping[str, Any],
    is_deletable: Callable[[str], bool],
    older_than_seconds: float,
    clock: Clock,
) -> tuple[str, ...]:
    """Abort unfinished uploads with s3fs, which finds credentials in more places.

    Args:
        url: URL of the store, ``s3://bucket/prefix``.
        arguments: Arguments of s3fs.
        is_deletable: As for :func:`abort_uploads`.
        older_than_seconds: As for :func:`abort_uploads`.
        clock: As for :func:`abort_uploads`.

    Raises:
        ConfigError: s3fs is not installed.
        StoreError: The server refused or did not answer.
    """
    filesystem, root = connect(url, "s3", arguments)
    bucket, _, prefix = root.strip("/").partition("/")
    start = f"{prefix}/" if prefix else ""
    try:
        return abort_uploads(
            _S3fsUploads(filesystem, bucket), start, is_deletable, older_than_seconds, clock
        )
    except errors_of("s3") as error:
        raise cleanup_error(
            url, kind_of_foreign(error), f"{type(error).__name__}: {error}"
        ) from fit_to_show(error)


def cleanup_error(url: str, kind: type[StoreError], reason: str) -> StoreError:
    """Return the error for a server that does not let us list or abort uploads."""
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
        """Request page after page."""
        markers: dict[str, str] = {}
        while True:
            page = self._filesystem.call_s3(
                "list_multipart_uploads", Bucket=self._bucket, Prefix=prefix, **markers
            )
            for entry in page.get("Uploads", ()):
                yield Upload(entry["Key"], entry["UploadId"], entry["Initiated"])
            if not page.get("IsTruncated"):
                return
            markers = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }

    def abort(self, upload: Upload) -> None:
        """Abort an upload; another attempt may already have done so."""
        try:
            self._filesystem.call_s3(
                "abort_multipart_upload",
                Bucket=self._bucket,
                Key=upload.key,
                UploadId=upload.upload_id,
            )
        except FileNotFoundError:
            return


_PAGE = 1000
_MISSING = 404


class SignedMultipartUploads:
    """The unfinished uploads of a bucket; one request per call, without retries.

    Args:
        bucket: Name of the bucket.
        wire: Connections to the bucket.
    """

    def __init__(self, bucket: str, wire: S3Connection) -> None:
        self._bucket, self._wire = bucket, wire

    def under(self, prefix: str) -> Iterator[Upload]:
        """Request page after page; https://docs.aws.amazon.com/AmazonS3/latest/API/.

        Raises:
            StoreError: The server refused or did not answer.
        """
        query = {"uploads": "", "prefix": prefix, "max-uploads": str(_PAGE)}
        while True:
            page = self._page(self._ask(HttpRequest("GET", query=query)))
            yield from page.uploads()
            if page.get("IsTruncated", "false") != "true":
                return
            query["key-marker"] = page.get("NextKeyMarker", "")
            query["upload-id-marker"] = page.get("NextUploadIdMarker", "")

    def abort(self, upload: Upload) -> None:
        """Abort an upload; another attempt may already have done so.

        Raises:
            StoreError: The server refused or did not answer.
        """
        self._ask(HttpRequest("DELETE", upload.key, {"uploadId": upload.upload_id}))

    def _page(self, text: bytes) -> _Page:
        try:
            return _Page(ET.fromstring(text))  # noqa: S314 - bounded, and expat bounds what it expands
        except ET.ParseError as error:
            raise self._failed(StoreUnavailable, f"incomplete response ({error})") from error

    def _ask(self, request: HttpRequest) -> bytes:
        try:
            with self._wire.ask(request) as response:
                text = response.text()
        except WIRE_ERRORS as error:
            raise self._failed(classify_timeout(error), str(error)) from error
        is_missing = request.method == "DELETE" and response.status == _MISSING
        if not (response.is_good or is_missing):
            code = field_of("Code", text.decode("utf-8", "replace"))
            raise self._failed(kind_of_answer(code, response.status), f"{response.status} {code}")
        return text

    def _failed(self, kind: type[StoreError], reason: str) -> StoreError:
        return cleanup_error(f"s3://{self._bucket}", kind, reason)


class _Page:
    """One page of the list of uploads."""

    def __init__(self, root: ET.Element) -> None:
        self._root = root

    def get(self, name: str, otherwise: str) -> str:
        """Return a field's text."""
        return _field(self._root, name) or otherwise

    def uploads(self) -> Iterator[Upload]:
        """Yield the uploads of the page."""
        for element in self._root.iter():
            if _name(element) == "Upload":
                initiated_at = datetime.fromisoformat(_field(element, "Initiated"))
                yield Upload(_field(element, "Key"), _field(element, "UploadId"), initiated_at)


def _name(element: ET.Element) -> str:
    # Some servers omit the namespace.
    return element.tag.rpartition("}")[2]


def _field(element: ET.Element, name: str) -> str:
    return next((child.text or "" for child in element if _name(child) == name), "")
