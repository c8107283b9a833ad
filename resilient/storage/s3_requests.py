"""List and abort multipart uploads by the standard library alone: obstore can do neither."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from resilient.errors import StoreError, StoreUnavailable
from resilient.storage.fs_errors import kind_of_answer
from resilient.storage.s3_wire import WIRE_ERRORS, Asked, field_of, kind_of_silence
from resilient.storage.uploads import Upload, cannot_clean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.storage.s3_wire import Wire

_PAGE = 1000
_MISSING = 404


class SignedUploads:
    """The unfinished uploads of a bucket; one request a call, which nobody repeats here.

    Args:
        bucket: its name.
        wire: connections to it.
    """

    def __init__(self, bucket: str, wire: Wire) -> None:
        self._bucket, self._wire = bucket, wire

    def under(self, prefix: str) -> Iterator[Upload]:
        """Ask for page after page; https://docs.aws.amazon.com/AmazonS3/latest/API/.

        Raises:
            StoreError: the server refused, or did not answer.
        """
        asked = {"uploads": "", "prefix": prefix, "max-uploads": str(_PAGE)}
        while True:
            page = self._page(self._ask(Asked("GET", query=asked)))
            yield from page.uploads()
            if page.get("IsTruncated", "false") != "true":
                return
            asked["key-marker"] = page.get("NextKeyMarker", "")
            asked["upload-id-marker"] = page.get("NextUploadIdMarker", "")

    def abort(self, upload: Upload) -> None:
        """Abort one; another life may have done so.

        Raises:
            StoreError: the server refused, or did not answer.
        """
        self._ask(Asked("DELETE", upload.key, {"uploadId": upload.number}))

    def _page(self, text: bytes) -> _Page:
        try:
            return _Page(ET.fromstring(text))  # noqa: S314 - bounded, and expat bounds what it expands
        except ET.ParseError as error:
            raise self._failed(StoreUnavailable, f"half an answer ({error})") from error

    def _ask(self, asked: Asked) -> bytes:
        try:
            with self._wire.ask(asked) as answer:
                text = answer.text()
        except WIRE_ERRORS as error:
            raise self._failed(kind_of_silence(error), str(error)) from error
        is_gone = asked.method == "DELETE" and answer.status == _MISSING
        if not (answer.is_good or is_gone):
            code = field_of("Code", text.decode("utf-8", "replace"))
            raise self._failed(kind_of_answer(code, answer.status), f"{answer.status} {code}")
        return text

    def _failed(self, kind: type[StoreError], reason: str) -> StoreError:
        return cannot_clean(f"s3://{self._bucket}", kind, reason)


class _Page:
    """One answer to the question which uploads there are."""

    def __init__(self, root: ET.Element) -> None:
        self._root = root

    def get(self, name: str, otherwise: str) -> str:
        """Return a field's text."""
        return _field(self._root, name) or otherwise

    def uploads(self) -> Iterator[Upload]:
        """Yield what the page tells of."""
        for one in self._root.iter():
            if _name(one) == "Upload":
                begun = datetime.fromisoformat(_field(one, "Initiated"))
                yield Upload(_field(one, "Key"), _field(one, "UploadId"), begun)


def _name(element: ET.Element) -> str:
    # Some servers leave the namespace out.
    return element.tag.rpartition("}")[2]


def _field(element: ET.Element, name: str) -> str:
    return next((one.text or "" for one in element if _name(one) == name), "")
