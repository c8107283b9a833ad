"""What a page shows of checkpoints: in a file, and made when it is asked for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from html.parser import HTMLParser

import pytest

from resilient.clock import SystemClock
from resilient.errors import StoreError
from resilient.format.keys import parse_checkpoint
from resilient.storage.open import open_store
from resilient_cli.commands.ui import RunPage
from resilient_cli.page import lazy_parts as desk_module
from resilient_cli.page.lazy_parts import RenderQueue
from resilient_cli.page.tensors import layer_of
from resilient_cli.store_wrappers import CountingStore
from resilient_cli.survey import VerifyLevel, examine
from tests.helpers.inspected_runs import EVIL, LAYERS, spoil, write_inspected_run

VOID = ("meta", "input", "path", "rect", "circle", "wbr")
LAST, BEFORE = "checkpoint-50-g2", "checkpoint-40-g2"


class Parsed(HTMLParser):
    """Elements and texts of a page; that each is closed, and nothing is referred to."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts, self.titles = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        given = dict(attrs)
        assert not {"src", "srcset", "onerror", "onclick"} & given.keys()
        assert given.get("href", "#").startswith("#")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def check_hostile(text):
    parsed = Parsed(text)
    assert "img" not in parsed.tags
    shown = "".join(parsed.texts)
    assert "<img src=x onerror=" in shown  # it is said, as the text that it is
    assert "\\x1b[31m\\u202e" in shown
    assert not re.search("[\x1b\u202e]", text)
    return shown


@pytest.fixture(scope="module")
def inspected(tmp_path_factory):
    return write_inspected_run(tmp_path_factory.mktemp("inspected") / "run")


@pytest.fixture
def spoilt(inspected, tmp_path):
    folder = shutil.copytree(inspected, tmp_path / "run")
    spoil(folder)
    return folder


@pytest.fixture
def page(inspected):
    found = RunPage([inspected], SystemClock())
    yield found
    found.close()


def asked(page, part, /, **fields):
    """Return the answer to what takes a while, asking again as the script of the page does."""
    for _ in range(600):
        status, text = page.part(part, fields)
        if status != 202:
            return status, text
    raise AssertionError("it is never made")


def test_two_checkpoints_become_a_page_of_their_own(inspected, call, tmp_path):
    path = tmp_path / "diff.html"
    outcome = call("ckpt", "diff", BEFORE, LAST, inspected, "--html", path, "--exit-code")
    assert outcome.status == 1
    assert f"page: {path}" in outcome.stdout
    text = path.read_text(encoding="utf-8")
    shown = check_hostile(text)
    assert "They differ: " in shown
    assert text.count('class="detail"') > 50
    assert 'aria-label="histogram of values"' in text
    assert 'aria-label="relative change of each layer"' in text
    assert "0 to 2" in shown  # NaN, in the tensor that has them
    assert all(f">h.{nth}<" in text for nth in range(LAYERS))
    assert "data-load" not in text
    assert "http-equiv" in text


def test_what_does_not_differ_has_no_picture(inspected, call, tmp_path):
    path = tmp_path / "same.html"
    assert call("ckpt", "diff", LAST, LAST, inspected, "--html", path, "--exit-code").status == 0
    text = path.read_text(encoding="utf-8")
    assert "No difference" in text
    assert 'class="detail"' not in text


def test_a_comparison_that_cannot_be_written_is_an_error(inspected, call, tmp_path):
    outcome = call("ckpt", "diff", LAST, LAST, inspected, "--html", tmp_path / "no" / "x.html")
    assert outcome.status == StoreError.exit_code
    assert "cannot write" in outcome.stderr


def test_a_page_in_a_file_has_what_was_asked_for(spoilt, call, tmp_path):
    path = tmp_path / "run.html"
    words = ("--verify", "--tensors", "latest", "--compare", "step:40", "latest")
    assert call("report", spoilt, "-o", path, *words).status == 0
    text = path.read_text(encoding="utf-8")
    shown = check_hostile(text)
    for word in ("tree of checkpoints by step", "timeline of generations", "size of each"):
        assert f'aria-label="{word}' in text
    rows = dict(
        re.findall(r'one-line">(checkpoint-\d+-g\d)(?:(?!</tr>).)*?(\w+)</span></td></tr>', text)
    )
    assert rows == {
        LAST: "ok", BEFORE: "ok", "checkpoint-30-g1": "DAMAGED", "checkpoint-20-g1": "DAMAGED",
        "checkpoint-10-g1": "ok",
    }  # fmt: skip
    assert "content is not what was committed" in shown
    assert "saved by sharing" in shown
    assert "model/h.7.attn.weight" in shown
    assert "They differ: " in shown
    plain = call("report", spoilt, "-o", path)
    assert plain.status == 0
    text = path.read_text(encoding="utf-8")
    assert "every byte" not in text
    assert "resilient ui RUN" in text


def test_what_is_part_of_a_page_needs_one(inspected, tmp_path, call):
    outcome = call("report", inspected, "--verify")
    assert (outcome.status, "resilient report RUN -o run.html" in outcome.stderr) == (2, True)
    shutil.copytree(inspected / "events", tmp_path / "events")
    outcome = call("report", tmp_path, "--verify", "-o", tmp_path / "x.html")
    assert outcome.status == 66
    assert not (tmp_path / "x.html").exists()


def test_parts_of_a_served_page_are_made_when_they_are_asked_for(page):
    status, text = asked(page, "tensors", of=LAST)
    assert status == 200
    assert "histogram?of=checkpoint-50-g2&amp;name=model%2Fh.7.attn.weight" in text
    Parsed(text)
    status, text = asked(page, "histogram", of=LAST, name="model/h.7.attn.weight")
    assert status == 200
    assert re.search(r"<dt>NaN</dt><dd><strong[^>]*>2<", text)
    Parsed(text)
    status, text = asked(page, "compare", a=BEFORE, b=LAST)
    assert status == 200
    check_hostile(text)
    assert "both?a=checkpoint-40-g2&amp;b=checkpoint-50-g2&amp;name=model%2Fhead.weight" in text
    status, text = asked(page, "both", a=BEFORE, b=LAST, name="model/head.weight")
    assert status == 200
    assert (text.count('class="h-a"'), text.count('class="h-b"')) == (2, 2)
    status, text = asked(page, "verify", of=LAST)
    assert (status, "is what was written" in text) == (200, True)


def test_what_is_damaged_is_told_in_its_place(spoilt):
    page = RunPage([spoilt], SystemClock())
    status, text = asked(page, "verify", of="checkpoint-30-g1")
    assert status == 200
    assert "content is not what was committed" in text
    status, text = asked(page, "histogram", of="checkpoint-20-g1", name="model/head.weight")
    assert (status, "ends too early" in text) == (200, True)
    page.close()


@pytest.mark.parametrize(
    ("name", "fields", "status"),
    [
        ("etc", {}, None),
        ("tensors", {}, 404),
        ("tensors", {"of": "checkpoint-77-g1"}, 404),
        ("tensors", {"of": f"../{LAST}"}, 404),
        ("tensors", {"of": "/etc/passwd"}, 404),
        ("tensors", {"of": LAST, "name": "x"}, 404),
        ("compare", {"a": LAST, "b": "latest"}, 404),
        ("histogram", {"of": LAST, "name": EVIL}, 200),
    ],
)
def test_nothing_else_is_answered(name, fields, status, page):
    if status is None:
        assert page.part(name, fields) is None
        return
    found, text = asked(page, name, **fields)
    assert found == status
    assert any(one in text for one in ("does not exist", "no longer exists", "there is no"))
    Parsed(text)


def test_what_takes_long_is_made_once_and_told_meanwhile():
    desk, made, go = RenderQueue(SystemClock()), [], threading.Event()

    def work(told):
        made.append(1)
        told(1, 4)
        go.wait(60)
        return "done"

    status, said = desk.ask(("x",), work)
    assert (status, said) == (202, "reading: 25 %")
    assert desk.ask(("y",), lambda _: "later") == (202, "waiting for its turn")
    go.set()
    while desk.ask(("x",), work)[0] == 202:
        pass
    assert desk.ask(("x",), work) == (200, "done")
    assert made == [1]
    desk.close()
    assert desk.ask(("z",), work)[0] == 503


def test_nothing_is_made_for_who_has_gone(monkeypatch):
    monkeypatch.setattr(desk_module, "_PATIENCE_SECONDS", 0.3)
    desk, ended = RenderQueue(SystemClock()), threading.Event()

    def work(told):
        try:
            for nth in range(10**9):
                told(nth, 10**9)
                time.sleep(0.01)
        finally:
            ended.set()

    assert desk.ask(("x",), work)[0] == 202
    assert ended.wait(60)
    # It is made anew for who comes back, and ends with the page.
    ended.clear()
    while desk.ask(("x",), work)[0] != 202:
        pass
    desk.close()
    assert ended.is_set()


def test_so_many_wait_and_no_more_and_what_fails_is_not_kept():
    desk, go = RenderQueue(SystemClock()), threading.Event()

    def fail(_):
        go.wait(60)
        raise StoreError("no <disk>", hint="")

    assert [desk.ask((str(nth),), fail)[0] for nth in range(9)] == [202] * 8 + [503]
    go.set()
    deadline = time.monotonic() + 60
    while desk.ask(("9",), lambda _: "room")[0] != 200:
        assert time.monotonic() < deadline
    status, text = desk.ask(("fails",), fail)
    assert (status, "no &lt;disk&gt;" in text) == (200, True)
    assert desk.ask(("fails",), lambda _: "mended") == (200, "mended")
    assert desk.ask(("fails",), fail) == (200, "mended")
    desk.close()


@pytest.mark.parametrize("is_failing", [True, False])
def test_what_is_not_kept_is_handed_out_once_however_long_it_took(is_failing):
    desk, go, made = RenderQueue(SystemClock()), threading.Event(), []

    def work(_):
        made.append(1)
        go.wait(60)
        if is_failing:
            raise StoreError("no disk", hint="")
        return "seen"

    assert desk.ask(("x",), work, is_once=True)[0] == 202
    go.set()
    desk.ask(("y",), lambda _: "behind it")
    status, said = desk.ask(("x",), work, is_once=True)
    assert (status, made) == (200, [1])
    assert ("no disk" if is_failing else "seen") in said
    assert desk.ask(("x",), work, is_once=True)[0] == 200
    assert made == [1, 1]
    desk.close()


def test_who_stops_asking_ends_the_reading_of_a_checkpoint(inspected):
    """Bytes that were read are told, and end the reading when nobody waits."""
    told = []

    def tell(done):
        told.append(done)
        if len(told) > 3:
            raise TimeoutError

    store = CountingStore(open_store(str(inspected)), tell)
    with pytest.raises(TimeoutError):
        examine(store, parse_checkpoint(LAST), VerifyLevel.DEEP)
    assert told == sorted(told)
    assert 0 < told[0] < told[-1]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model/transformer.h.10.attn.weight", "transformer.h.10"),
        ("optimizer/transformer.h.10.attn.weight.exp_avg", "transformer.h.10"),
        ("optimizer/head.weight.exp_avg", "head"),
        ("model/head.weight", "head"),
        ("model/0.weight", "0"),
        ("model/bias", "bias"),
    ],
)
def test_a_layer_is_what_the_first_number_ends(name, layer):
    assert layer_of(name) == layer


def test_neither_torch_nor_more_than_before_is_loaded(inspected, tmp_path):
    program = (
        "import sys; from resilient_cli.app import main; "
        "assert main(sys.argv[2:]) == 0; "
        "assert not set(sys.argv[1].split()) & set(sys.modules)"
    )

    def run(forbidden, *words):
        command = [sys.executable, "-c", program, forbidden, *map(str, words)]
        subprocess.run(command, check=True, env={**os.environ, "NO_COLOR": "1"}, timeout=120)

    run("torch numpy", "ckpt", "ls", inspected)
    run("torch numpy", "report", inspected)
    run("torch numpy", "report", inspected, "-o", tmp_path / "a.html")
    run("torch", "ckpt", "diff", BEFORE, LAST, inspected, "--html", tmp_path / "b.html")
