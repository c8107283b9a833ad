"""The server of figures, asked well, badly, slowly and by many at once."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress

import pytest

from resilient.elastic.metrics import server as server_module
from resilient.elastic.metrics.server import CONNECTIONS_MAX, HEAD_BYTES_MAX, MetricsServer
from resilient.errors import ConfigError


@pytest.fixture
def health():
    return {"is_well": True}


@pytest.fixture
def server(health):
    page = "resilient_step 1\n" * 50_000
    one = MetricsServer("127.0.0.1", 0, lambda: page, lambda: (health["is_well"], "so it is"))
    one.start()
    yield one
    one.close()
    assert not one._thread.is_alive()


def get(server, path="/metrics"):
    url = server.url.replace("/metrics", path)
    return urllib.request.urlopen(url, timeout=20)  # noqa: S310 - our own


def connect(server):
    one = socket.create_connection(server._socket.getsockname(), timeout=20)
    one.settimeout(20)
    return one


def said(one):
    """Return all that comes until the other side is done with us."""
    data = b""
    with suppress(ConnectionError):
        while more := one.recv(1 << 16):
            data += more
    return data


def ask(server, request):
    with connect(server) as one:
        one.sendall(request)
        return said(one)


def test_figures_are_served_whole(server):
    with get(server) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert answer.read() == b"resilient_step 1\n" * 50_000


def test_health_is_a_status(server, health):
    with get(server, "/healthz") as answer:
        assert answer.read() == b"so it is\n"
    health["is_well"] = False
    with pytest.raises(urllib.error.HTTPError) as error:
        get(server, "/healthz")
    assert error.value.code == 503
    error.value.close()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /metrics?x=1 HTTP/1.0\r\n\r\n", b"200"),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", b"200"),
        (b"GET /etc/passwd HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\n", b"405"),
        (b"\x00\xff nonsense\r\n\r\n", b"400"),
        (b"\r\n\r\n", b"400"),
    ],
)
def test_every_request_has_its_answer(server, request_bytes, status):
    answer = ask(server, request_bytes)
    assert answer.split(b" ")[1] == status
    if request_bytes.startswith(b"HEAD"):
        assert answer.endswith(b"\r\n\r\n")


def test_a_head_without_an_end_is_not_kept(server):
    sent = b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 16 * HEAD_BYTES_MAX
    with connect(server) as one:
        with suppress(ConnectionError):
            one.sendall(sent)
        assert b"200" not in said(one)[:20]
    assert is_served(server)


def test_who_is_slow_or_reads_nothing_is_let_go_and_holds_up_nobody(server, monkeypatch):
    monkeypatch.setattr(server_module, "REQUEST_SECONDS", 1.0)
    slow, deaf = connect(server), connect(server)
    slow.sendall(b"GET /met")
    deaf.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    wait_until(lambda: is_served(server))
    assert said(slow) == b""
    slow.close()
    deaf.close()


def test_many_connections_take_no_threads_and_leave_room_when_they_end(server, monkeypatch):
    monkeypatch.setattr(server_module, "REQUEST_SECONDS", 60.0)
    before = threading.active_count()
    held = [connect(server) for _ in range(4 * CONNECTIONS_MAX)]
    # Those beyond the bound are dropped; the others are kept waiting.
    wait_until(lambda: sum(map(is_closed, held)) == 3 * CONNECTIONS_MAX)
    assert threading.active_count() == before
    for one in held:
        one.close()
    wait_until(lambda: is_served(server))


def wait_until(is_so):
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < 60
        time.sleep(0.02)


def is_closed(one):
    """Say whether the other side has dropped us by now."""
    one.setblocking(False)
    try:
        return one.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def is_served(server):
    try:
        with get(server) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError):
        return False


def test_a_port_that_is_taken_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port}"):
            MetricsServer("127.0.0.1", port, str, lambda: (True, ""))


@pytest.mark.parametrize("host", ["192.0.2.1", "a" * 70])
def test_an_address_that_is_none_of_this_host_is_refused(host):
    with pytest.raises(ConfigError, match="--metrics-port: cannot listen at"):
        MetricsServer(host, 0, str, lambda: (True, ""))


def test_a_server_that_was_never_started_is_closed_as_well():
    MetricsServer("127.0.0.1", 0, str, lambda: (True, "")).close()


def test_a_name_of_another_family_is_named_in_brackets():
    try:
        one = MetricsServer("::1", 0, str, lambda: (True, ""))
    except ConfigError:
        pytest.skip("this host has no IPv6")
    assert one.url.startswith("http://[::1]:")
    one.close()
