"""A checkpoint behind a web server that answers in the ways in which real ones do."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

CODES = {"missing": 404, "forbidden": 403, "unasked": 401, "broken": 500, "busy": 503}


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder; the first part of a path says how.

    ``ranged`` knows ranges, ``whole`` does not, ``chunked`` says no length, ``moved`` leads to
    ``ranged``, ``around`` to itself, ``bare`` lists nothing; the others refuse with their code.
    """

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Say nothing."""

    def do_HEAD(self):
        self._answer(is_head=True)

    def do_GET(self):
        self._answer(is_head=False)

    def _answer(self, *, is_head):
        mode, _, path = self.path.lstrip("/").partition("/")
        if mode in CODES:
            self.send_error(CODES[mode], "said \x1b[2Jno")
        elif mode in ("moved", "around"):
            self.send_response(302)
            self.send_header("Location", f"/{'ranged' if mode == 'moved' else mode}/{path}")
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self.path = f"/{path}"
            self._file(mode, is_head=is_head)

    def _file(self, mode, *, is_head):
        path = self.translate_path(self.path)
        try:
            with open(path, "rb") as file:  # noqa: PTH123 - as the server does
                data = file.read()
        except IsADirectoryError:
            return self._folder(mode)
        except OSError:
            return self.send_error(404)
        part = self._part(len(data)) if mode in ("ranged", "bare") else None
        self.send_response(200 if part is None else 206)
        if part is not None:
            first, last = part
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
            data = data[first : last + 1]
        if mode == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if mode == "chunked":
            data = b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
        if not is_head:
            self.wfile.write(data)
        return None

    def _part(self, size):
        """Return the first and the last byte that are asked for; None where all are."""
        span = self.headers.get("Range")
        if not span:
            return None
        first, _, last = span.removeprefix("bytes=").partition("-")
        if not first:
            return max(0, size - int(last)), size - 1
        return int(first), min(int(last or size), size - 1)

    def _folder(self, mode):
        if mode == "bare":
            return self.send_error(403)
        listing = self.list_directory(self.translate_path(self.path))
        if listing and self.command != "HEAD":
            self.copyfile(listing, self.wfile)
        return None


class Server(ThreadingHTTPServer):
    """A server that says nothing of clients who have heard enough."""

    daemon_threads = True

    def handle_error(self, *_):
        """Say nothing."""


@contextmanager
def serve_folder(folder):
    """Serve a folder; gives the address."""
    server = Server(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
