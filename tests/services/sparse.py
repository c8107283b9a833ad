"""A server of S3 that reads a folder of this machine, and counts what it sends.

It knows what reading needs: listing, HEAD and GET with a range. A checkpoint of a terabyte that has
holes for data is served from no space at all. It listens on 127.0.0.1.
"""

from __future__ import annotations

import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

BUCKET = "bucket"
_DATE = "Thu, 01 Jan 2026 00:00:00 GMT"
_LISTED = "<Contents><Key>{key}</Key><Size>{size}</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;1&quot;</ETag></Contents>"  # noqa: E501


class SparseServer:
    """Serves a folder as the bucket ``bucket``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sent_bytes = 0
        self.requests: list[str] = []
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"served": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def count(self, request: str, sent_bytes: int) -> None:
        """Add what one answer was."""
        with self._lock:
            self.requests.append(request)
            self.sent_bytes += sent_bytes


class _Handler(BaseHTTPRequestHandler):
    served: SparseServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        split = urlsplit(self.path)
        key = unquote(split.path).removeprefix(f"/{BUCKET}").lstrip("/")
        path = self.served.folder / key
        if not key:
            body = _listing(self.served.folder, parse_qs(split.query)).encode()
            self._send(200, body, len(body), {}, has_body=has_body)
        elif not path.is_file():
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>", None, {}, has_body=has_body)
        else:
            self._send_file(path, has_body=has_body)

    def _send_file(self, path: Path, *, has_body: bool) -> None:
        size = path.stat().st_size
        headers = {"ETag": '"1"', "Last-Modified": _DATE, "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range")
        first, last = 0, size - 1
        if wanted:
            start, _, end = wanted.removeprefix("bytes=").partition("-")
            first = int(start) if start else max(0, size - int(end))
            last = min(size - 1, int(end)) if start and end else size - 1
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        data = b""
        if has_body:
            with path.open("rb") as file:
                data = os.pread(file.fileno(), last - first + 1, first)
        self._send(206 if wanted else 200, data, last - first + 1, headers, has_body=has_body)

    def _send(
        self,
        status: int,
        body: bytes,
        length: int | None,
        headers: dict[str, str],
        *,
        has_body: bool,
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        sent = body if has_body else b""
        self.served.count(f"{self.command} {self.path}", len(sent))
        self.wfile.write(sent)


def _listing(folder: Path, query: dict[str, list[str]]) -> str:
    prefix = query.get("prefix", [""])[0]
    found, groups = [], set()
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        key = path.relative_to(folder).as_posix()
        if not key.startswith(prefix):
            continue
        head, slash, _ = key.removeprefix(prefix).partition(query.get("delimiter", ["\0"])[0])
        if slash:
            groups.add(prefix + head + slash)
        else:
            found.append(_LISTED.format(key=escape(key), size=path.stat().st_size))
    common = "".join(f"<CommonPrefixes><Prefix>{one}</Prefix></CommonPrefixes>" for one in groups)
    return (
        '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(found)}</KeyCount>"
        f"<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{''.join(found)}{common}"
        "</ListBucketResult>"
    )
