"""``resilient ui``: the real program, asked by real requests."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

import pytest

from resilient_cli.commands.ui import RunPage
from resilient_cli.page.page import page_of
from resilient_cli.page.server import PageServer
from tests.helpers.json_schemas import check
from tests.helpers.told import killed_run

SAID = ("36.7 %", "aws: spot terminate", "checkpoint-5-g1")


def hear_ctrl_c():
    """Undo what a shell does for what it starts in the background, tests for one."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Served:
    """A `resilient ui` that runs, and how to ask it."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "events").mkdir()
        self.write(9)
        command = [sys.executable, "-m", "resilient_cli", "ui", str(folder), "--json"]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=hear_ctrl_c,  # noqa: PLW1509 - it takes no lock
        )
        self.said = json.loads(self.process.stdout.readline())
        check(self.said)
        self.address = urlsplit(self.said["url"])

    def write(self, lines=None):
        text = "\n".join(killed_run()[:lines]) + "\n"
        (self.folder / "events" / "agent.jsonl").write_text(text, encoding="utf-8")

    def ask(self, path, method="GET", **headers):
        connection = http.client.HTTPConnection(self.address.hostname, self.address.port, timeout=9)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        return answer, body


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    one = Served(tmp_path_factory.mktemp("run"))
    yield one
    one.process.kill()
    one.process.communicate()


def test_it_says_where_and_serves_the_page_there_and_on_the_loopback_alone(served):
    assert (served.said["schema"], served.said["type"]) == ("resilient/ui@1", "serving")
    assert served.address.hostname == "127.0.0.1"
    assert len(served.address.path) > 40
    answer, body = served.ask(served.address.path)
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert "checkpoint-5-g1" in body
    for name, value in {
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
    }.items():
        assert answer.headers[name] == value
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert not [one for one in answer.headers if one.lower().startswith("access-control")]


def test_who_does_not_know_the_address_or_names_another_host_is_refused(served):
    path, port = served.address.path, served.address.port
    wrong = path[:-2] + ("A" if path[-2] != "A" else "B") + "/"
    for one in ("/", "/version", wrong, path[:-1], f"{wrong}version", f"/x{path}", f"?{path}"):
        answer, body = served.ask(one)
        assert answer.status == 403, one
        assert path not in body
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port}.evil"):
        assert served.ask(path, Host=host)[0].status == 403, host
    assert served.ask(path, Host=f"localhost:{port}")[0].status == 200
    assert served.ask(f"{path}etc")[0].status == 404


def test_it_can_be_read_and_nothing_else(served):
    answer, body = served.ask(served.address.path, "HEAD")
    assert (answer.status, body) == (200, "")
    assert int(answer.headers["Content-Length"]) > 1000
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "WHAT"):
        answer, _ = served.ask(served.address.path, method, Origin="http://evil.example")
        assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
        assert "Access-Control-Allow-Origin" not in answer.headers


def test_what_is_no_request_gets_no_page(served):
    with socket.create_connection((served.address.hostname, served.address.port), 9) as raw:
        raw.sendall(b"GET " + served.address.path.encode() + b" HTTP/1.1\r\n\r\n")
        assert raw.makefile("rb").read().startswith(b"HTTP/1.0 403 ")
    with socket.create_connection((served.address.hostname, served.address.port), 9) as raw:
        raw.sendall(b"\x00\xff<script>\r\n\r\n")
        assert b"script" not in raw.makefile("rb").read()


def test_it_has_a_new_version_when_the_run_went_on_and_ends_with_ctrl_c(served):
    before = served.ask(f"{served.address.path}version")[1]
    assert f'content="{before}"' in served.ask(served.address.path)[1]
    served.write()
    deadline = time.monotonic() + 60
    while served.ask(f"{served.address.path}version")[1] == before:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    page = served.ask(served.address.path)[1]
    assert [word for word in SAID if word not in page] == []
    served.process.send_signal(signal.SIGINT)
    _, complaint = served.process.communicate(timeout=60)
    assert (served.process.returncode, complaint) == (130, b"")


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def monotonic_seconds(self):
        return self.seconds


def test_a_page_outlives_its_files_and_is_not_made_again_for_nothing(tmp_path, monkeypatch):
    made = []

    def counted(*arguments):
        made.append(arguments[-1])
        return page_of(*arguments)

    monkeypatch.setattr("resilient_cli.commands.ui.page_of", counted)
    file, clock = tmp_path / "agent.jsonl", Clock()
    file.write_text("\n".join(killed_run()[:9]) + "\n", encoding="utf-8")
    page = RunPage([tmp_path], clock)
    first = page.text()
    file.write_text("\n".join(killed_run()) + "\n", encoding="utf-8")
    assert page.text() == first  # it has just looked
    clock.seconds += 1
    second = page.text()
    assert second != first
    file.unlink()
    clock.seconds += 1
    assert page.text() == second
    assert len(made) == len(set(made)) == 2


def test_a_port_that_is_taken_and_a_run_that_is_none_are_told(tmp_path, call):
    assert call("ui", tmp_path).status == 66
    (tmp_path / "agent.jsonl").write_text("\n".join(killed_run()) + "\n", encoding="utf-8")
    with PageServer(0, None) as taken:
        outcome = call("ui", tmp_path, "--port", taken.port)
    assert outcome.status == 78
    assert "--port: cannot listen at 127.0.0.1:" in outcome.stderr


def test_ctrl_c_ends_it_wherever_the_interpreter_is(tmp_path):
    """Python drops what is raised while an object ends: its own handler would be heard nowhere."""
    (tmp_path / "agent.jsonl").write_text("\n".join(killed_run()) + "\n", encoding="utf-8")
    server = PageServer(0, RunPage([tmp_path], Clock()))

    class Ending:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGINT)

    def end_one():
        Ending()

    server.service_actions = end_one
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with server, pytest.raises(KeyboardInterrupt):
            server.serve_until_interrupted()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_is_not_to_hear_ctrl_c_goes_on(tmp_path):
    """A shell starts it like that behind an `&`."""
    (tmp_path / "agent.jsonl").write_text("\n".join(killed_run()) + "\n", encoding="utf-8")
    server, looks = PageServer(0, RunPage([tmp_path], Clock())), []

    def look():
        looks.append(os.kill(os.getpid(), signal.SIGINT))
        if len(looks) == 3:
            threading.Thread(target=server.shutdown, daemon=True).start()

    server.service_actions = look
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with server, pytest.raises(KeyboardInterrupt):
            server.serve_until_interrupted()
        assert len(looks) >= 3
    finally:
        signal.signal(signal.SIGINT, before)
