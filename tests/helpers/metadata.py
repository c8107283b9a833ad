"""Metadata servers of clouds on the loopback, as faithful as their documentation allows."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NAME = "machine-7"


def iso(seconds):
    """Return a moment that is ``seconds`` from now, as EC2 writes it."""
    return datetime.fromtimestamp(time.time_ns() / 1e9 + seconds, UTC).strftime(
        "%Y-%m-%dT%H:%M:%SZ"
    )


def http_date(seconds):
    """Return a moment that is ``seconds`` from now, as Azure writes it."""
    moment = datetime.fromtimestamp(time.time_ns() / 1e9 + seconds, UTC)
    return format_datetime(moment, usegmt=True)


class Metadata(ThreadingHTTPServer):
    """A server whose answers a test sets; ``asked`` has every request line."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked = []
        self.changed = threading.Condition()
        self.is_closed = False

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def set(self, **values):
        with self.changed:
            for name, value in values.items():
                assert hasattr(self, name)
                setattr(self, name, value)
            self.changed.notify_all()

    def respond(self, method, path, query, headers, body):
        """Return status, headers and body."""
        raise NotImplementedError

    def handle_error(self, request, client_address):
        """Say nothing: clients give up here on purpose."""


class Aws(Metadata):
    """IMDSv2: a token, then what it is asked for; 404 for what is not announced."""

    def __init__(self):
        super().__init__()
        self.action = None
        self.rebalance = None
        self.token_status = 200
        self.hop_seconds = 0.0
        self.allows_v1 = False
        self.tokens = []

    def respond(self, method, path, query, headers, body):
        if path == "/latest/api/token":
            return self._give_token(method, headers)
        token = headers.get("X-aws-ec2-metadata-token")
        if token not in self.tokens and not (self.allows_v1 and token is None):
            return 401, {}, ""
        document = {
            "/latest/meta-data/spot/instance-action": self.action,
            "/latest/meta-data/events/recommendations/rebalance": self.rebalance,
        }.get(path)
        if document is None:
            return 404, {}, "<html>404 - Not Found</html>"
        return 200, {}, document if isinstance(document, str) else json.dumps(document)

    def _give_token(self, method, headers):
        if self.hop_seconds:
            # The answer dies on its way into the container.
            time.sleep(self.hop_seconds)
        if method != "PUT" or "X-Forwarded-For" in headers:
            return 403, {}, ""
        if not 1 <= int(headers.get("X-aws-ec2-metadata-token-ttl-seconds", 0)) <= 21_600:
            return 400, {}, ""
        if self.token_status != 200:
            return self.token_status, {}, ""
        self.tokens.append(f"token-{len(self.tokens)}==")
        return 200, {}, self.tokens[-1]


class Gcp(Metadata):
    """Values with an etag each; ``wait_for_change`` answers when the value is another one."""

    def __init__(self):
        super().__init__()
        self.preempted = "FALSE"
        self.maintenance = "NONE"
        self.flavor = "Google"

    def respond(self, method, path, query, headers, body):
        if headers.get("Metadata-Flavor") != "Google":
            return 403, {}, "Missing Metadata-Flavor:Google header."
        names = {"preempted": "preempted", "maintenance-event": "maintenance"}
        name = names.get(path.removeprefix("/computeMetadata/v1/instance/"))
        if name is None:
            return 404, {}, ""
        if query.get("wait_for_change") == "true":
            until = time.monotonic() + float(query.get("timeout_sec", 3600))
            with self.changed:
                while (
                    self._etag(name) == query.get("last_etag")
                    and time.monotonic() < until
                    and not self.is_closed
                ):
                    self.changed.wait(0.05)
        return 200, {"Metadata-Flavor": self.flavor, "ETag": self._etag(name)}, getattr(self, name)

    def _etag(self, name):
        return f"{abs(hash(getattr(self, name))):x}"


class Azure(Metadata):
    """Scheduled events and their acknowledgement."""

    def __init__(self):
        super().__init__()
        self.events = []
        self.acknowledged = []
        self.body = None

    def respond(self, method, path, query, headers, body):
        if headers.get("Metadata") != "true" or not query.get("api-version"):
            return 400, {}, '{"error": "Bad request"}'
        if path == "/metadata/instance/compute/name":
            return 200, {}, NAME
        if path != "/metadata/scheduledevents":
            return 404, {}, ""
        if method == "POST":
            event_ids = [event["EventId"] for event in json.loads(body)["StartRequests"]]
            self.acknowledged += event_ids
            return 200, {}, ""
        document = {"DocumentIncarnation": len(self.events), "Events": self.events}
        return 200, {}, json.dumps(document) if self.body is None else self.body

    @staticmethod
    def event(kind="Preempt", seconds=30, resources=(NAME,), not_before=None):
        return {
            "EventId": "A123BC45-1234-5678-AB90-ABCDEF123456",
            "EventStatus": "Scheduled",
            "EventType": kind,
            "ResourceType": "VirtualMachine",
            "Resources": list(resources),
            "NotBefore": http_date(seconds) if not_before is None else not_before,
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }


class Plain(Metadata):
    """A URL of the user's own."""

    def __init__(self):
        super().__init__()
        self.status = 404
        self.body = ""

    def respond(self, method, path, query, headers, body):
        return self.status, {}, self.body


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 5

    def _any(self):
        path, _, text = self.path.partition("?")
        query = dict(pair.partition("=")[::2] for pair in text.split("&") if pair)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append(f"{self.command} {self.path}")
        status, headers, text = self.server.respond(self.command, path, query, self.headers, body)
        data = text.encode() if isinstance(text, str) else text
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)
        self.close_connection = True

    do_GET = do_PUT = do_POST = _any  # noqa: N815 - the names of http.server

    def log_message(self, *_):
        pass


@contextmanager
def serving(server):
    """Serve until the end of the block."""
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.is_closed = True
        server.shutdown()
        server.server_close()
        thread.join()
