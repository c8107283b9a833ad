"""List and abort multipart uploads by the standard library alone: obstore can do neither."""

from __future__ import annotations

import http.client
import os
import ssl
from datetime import datetime
from typing import TYPE_CHECKING
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen
from xml.etree import ElementTree as ET

from resilient.errors import StoreError, StoreUnavailable
from resilient.storage.fs_errors import kind_of_answer, kind_of_foreign
from resilient.storage.s3_options import trusted
from resilient.storage.s3_sign import query_of, signed_headers
from resilient.storage.uploads import Upload, cannot_clean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.clock import Clock
    from resilient.storage.s3_options import S3Options
    from resilient.storage.s3_sign import Credentials

_ANSWER_BYTES_MAX = 16 << 20
_PAGE = 1000
_MISSING = 404


class SignedUploads:
    """The unfinished uploads of a bucket; one request a call, which nobody repeats here.

    Args:
        bucket: its name.
        options: the endpoint, whom to trust, how long to wait.
        who: signs.
        clock: tells the time that is signed.
    """

    def __init__(self, bucket: str, options: S3Options, who: Credentials, clock: Clock) -> None:
        self._bucket, self._who, self._clock = bucket, who, clock
        self._base = f"{_endpoint(options, who.region)}/{quote(bucket)}"
        self._within_seconds = options.request_seconds
        # https without a context would not know of whom else to trust.
        self._trust = ssl.create_default_context() if self._base.startswith("https:") else None
        pem = trusted(options).decode("ascii", "ignore")
        if self._trust and pem:
            self._trust.load_verify_locations(cadata=pem)

    def under(self, prefix: str) -> Iterator[Upload]:
        """Ask for page after page; https://docs.aws.amazon.com/AmazonS3/latest/API/.

        Raises:
            StoreError: the server refused, or did not answer.
        """
        asked = {"uploads": "", "prefix": prefix, "max-uploads": str(_PAGE)}
        while True:
            page = self._page(self._ask("GET", f"{self._base}?{query_of(asked)}"))
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
        where = f"{self._base}/{quote(upload.key, safe='/-._~')}"
        self._ask("DELETE", f"{where}?{query_of({'uploadId': upload.number})}")

    def _page(self, text: bytes) -> _Page:
        try:
            return _Page(ET.fromstring(text))  # noqa: S314 - bounded, and expat bounds what it expands
        except ET.ParseError as error:
            raise self._failed(StoreUnavailable, f"half an answer ({error})") from error

    def _ask(self, method: str, url: str) -> bytes:
        now = datetime.fromisoformat(self._clock.now_iso())
        request = Request(url, method=method, headers=signed_headers(method, url, self._who, now))  # noqa: S310 - the user's endpoint
        try:
            with urlopen(request, timeout=self._within_seconds, context=self._trust) as answer:  # noqa: S310
                return bytes(answer.read(_ANSWER_BYTES_MAX))
        except HTTPError as error:
            if method == "DELETE" and error.code == _MISSING:
                return b""
            raise self._refused(error) from error
        except (URLError, OSError, http.client.HTTPException) as error:
            cause = error.reason if isinstance(error, URLError) else error
            kind = kind_of_foreign(cause) if isinstance(cause, Exception) else StoreUnavailable
            kind = StoreUnavailable if kind is StoreError else kind
            raise self._failed(kind, str(cause)) from error

    def _refused(self, error: HTTPError) -> StoreError:
        text = error.read(_ANSWER_BYTES_MAX).decode("utf-8", "replace")
        code = text.partition("<Code>")[2].partition("</Code>")[0]
        return self._failed(kind_of_answer(code, error.code), f"{error.code} {code}")

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


def _endpoint(options: S3Options, region: str) -> str:
    """Return where the bucket is asked for by path, as every server of S3 understands it."""
    variables = (os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
    given = options.endpoint or next(filter(None, variables), "")
    parts = urlsplit(given or f"https://s3.{region}.amazonaws.com")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
