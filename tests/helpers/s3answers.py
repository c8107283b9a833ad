"""A server of S3 that answers what it is told to, and connections of ours to it."""

import socket
import threading
import time
from contextlib import contextmanager, suppress

from resilient.clock import SystemClock
from resilient.storage import s3_client
from resilient.storage.options import read_s3_options
from resilient.storage.s3_client import connect_s3
from resilient.storage.s3_transfer import S3Transfer

_DRIP_SECONDS = 0.03
KEEP, CLOSE = "", "connection: close\r\n"
DONE = b"<CompleteMultipartUploadResult><ETag></ETag></CompleteMultipartUploadResult>"
BEGUN = b"<InitiateMultipartUploadResult><UploadId>u/1</UploadId></InitiateMultipartUploadResult>"


def reply(status, body=b"", headers=KEEP, length=None):
    length = len(body) if length is None else length
    return f"HTTP/1.1 {status} x\r\ncontent-length: {length}\r\n{headers}\r\n".encode() + body


def refusal(status, code):
    text = f"<Error><Code>{code}</Code><Message>no &amp; no</Message></Error>"
    return reply(status, text.encode())


class Server:
    """Gives its answers one by one, and remembers what was asked.

    An answer is what is sent after a whole request, a list of them drop by drop; None hangs up
    without one.
    """

    def __init__(self, *answers):
        self.answers = list(answers)
        self.heads, self.bodies, self.connections = [], [], 0
        self._lock = threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            serving = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(serving)
            serving.start()

    def _serve(self, connection):
        connection.settimeout(5)
        with connection, connection.makefile("rb") as file:
            while True:
                head = b"".join(iter(lambda: _line(file), b""))
                if not head:
                    return
                lines = head.decode().lower().split("\r\n")
                sizes = [line.split(":")[1] for line in lines if line.startswith("content-length")]
                body = file.read(int(sizes[0])) if sizes else b""
                with self._lock:
                    self.heads.append(head.decode())
                    self.bodies.append(body)
                    answer = self.answers.pop(0)
                if answer is None:
                    return
                pieces = answer if isinstance(answer, list) else [answer]
                for piece in pieces:
                    with suppress(OSError):
                        connection.sendall(piece)
                    time.sleep(_DRIP_SECONDS if len(pieces) > 1 else 0)
                if CLOSE.encode() in pieces[0]:
                    return

    def end(self):
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join()


def _line(file):
    try:
        line = file.readline()
    except OSError:
        return b""
    return line if line.strip() else b""


@contextmanager
def serving(*answers, **options):
    server = Server(*answers)
    options_of_store = {
        "endpoint": f"http://127.0.0.1:{server.port}",
        "key": "k",
        "secret": "s",
        **options,
    }
    wire = connect_s3("bucket", read_s3_options(options_of_store), SystemClock())
    try:
        yield server, S3Transfer("s3://bucket/run", wire, "run")
    finally:
        s3_client._close(wire._idle)
        server.end()
