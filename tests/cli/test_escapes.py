"""No name, value or message of anybody's is obeyed by a terminal, whichever command shows it."""

from __future__ import annotations

import ast
import json
import re
from io import StringIO
from pathlib import Path

import pytest
import torch

import resilient_cli
from resilient.errors import StoreError
from resilient_cli import output
from resilient_cli.output import CommandResult, KeyValues, Output, Table, put, show

SOURCES = Path(resilient_cli.__file__).parent
EVIL = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\rOK\u202edne\x9b5m\x7f\u2066"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069]")


@pytest.fixture
def pair(tmp_path):
    """Two checkpoints of a Trainer whose names, values and files are hostile."""
    for number, name in enumerate(("a", "b")):
        folder = tmp_path / name / "checkpoint-1"
        folder.mkdir(parents=True)
        weights = {f"{EVIL}.weight": torch.full((2,), float(number)), "plain": torch.ones(2)}
        torch.save(weights, folder / "pytorch_model.bin")
        torch.save({"state": {}, EVIL: {number}}, folder / "optimizer.pt")
        torch.save({f"x{EVIL}": {number}, EVIL: number}, folder / "scheduler.pt")
        (folder / f"x{EVIL}.json").write_text(str(number))
        (folder / "config.json").write_text(json.dumps({EVIL: EVIL * (number + 1)}))
        state = {"global_step": 1, "epoch": 1.0, "log_history": [], EVIL: [EVIL, number]}
        (folder / "trainer_state.json").write_text(json.dumps(state))
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0" + EVIL.encode()[:8])
    return tmp_path / "a" / "checkpoint-1", tmp_path / "b" / "checkpoint-1"


CALLS = {
    "inspect": ("ckpt", "inspect", "A"),
    "inspect --tensors": ("ckpt", "inspect", "A", "--tensors"),
    "verify": ("ckpt", "verify", "B"),
    "diff": ("ckpt", "diff", "A", "B", "--all"),
    "scan": ("ckpt", "scan", "B"),
    "cat a section": ("ckpt", "cat", "A", "model_config"),
    "cat a tensor": ("ckpt", "cat", "A", f"{EVIL}.weight"),
    "cat nothing": ("ckpt", "cat", "A", f"no{EVIL}"),
    "ls": ("ckpt", "ls", "A/.."),
    "ls nowhere": ("ckpt", "ls", f"A/{EVIL}"),
    "repair": ("ckpt", "repair", "B"),
    "inspect nowhere": ("ckpt", "inspect", f"A/{EVIL}"),
    "a wrong option": ("ckpt", "inspect", f"--{EVIL}"),
    "a wrong command": (f"ck{EVIL}",),
    "another tool's place": ("ckpt", "export", "latest", f"A/{EVIL}", "A"),
}


@pytest.mark.parametrize("form", ["human", "plain", "json", "quiet", "colored"])
@pytest.mark.parametrize("words", CALLS.values(), ids=CALLS)
def test_nothing_that_a_terminal_obeys_is_written(words, form, pair, capsys, monkeypatch):
    from resilient_cli.app import main

    options = {"quiet": ["-q"], "colored": []}.get(form, ["--format", form])
    if form == "colored":
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
    given = [word.replace("A", str(pair[0]), 1) if word[0] == "A" else word for word in words]
    given = [str(pair[1]) if word == "B" else word for word in given]
    main([*given, *options])
    captured = capsys.readouterr()
    for text in (captured.out, captured.err):
        own = re.sub("\x1b\\[(?:32|31;1|33|2|0)m", "", text) if form == "colored" else text
        assert OBEYED.findall(own) == []
    assert captured.out + captured.err or form == "quiet"


def test_a_message_of_a_server_can_fake_neither_a_line_nor_a_hint(call, monkeypatch):
    def fails(*_, **__):
        raise StoreError(f"said\n  hint: rm -rf {EVIL}", hint=f"resilient\n{EVIL}")

    monkeypatch.setattr("resilient_cli.commands.ls.open_repository", fails)
    outcome = call("ckpt", "ls", "x")
    assert OBEYED.findall(outcome.stderr) == []
    assert [line for line in outcome.stderr.splitlines() if line.startswith("  hint: rm")] == []
    assert len([line for line in outcome.stderr.splitlines() if line.startswith("  hint")]) == 1


def test_colours_of_a_name_are_spelled_and_our_own_are_not(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    blocks = (Table(("A", "B"), (("ok", "\x1b[32mok\x1b[0m"),)), KeyValues((("\x1b[2m", "x"),)))
    show(CommandResult("x", "x", {}, (*blocks, "said \x1b[31;1mDAMAGED")), Output())
    shown = capsys.readouterr().out
    assert shown.count("\x1b[") == 2
    assert shown.count("\\x1b[") == 4


def test_a_delete_is_escaped_in_json_as_json_does(capsys):
    from resilient_cli.output import Format

    show(CommandResult("x", "x", {"a": "b\x7f"}, ()), Output(Format.JSON))
    shown = capsys.readouterr().out
    assert json.loads(shown)["a"] == "b\x7f"
    assert "\x7f" not in shown


def test_newlines_and_tabs_that_are_meant_stay():
    stream = StringIO()
    put("a\n\tb\x1b\n", stream)
    assert stream.getvalue() == "a\n\tb\\x1b\n"


THE_WAY = {"output.py": 4}
"""What escapes a text and writes it, clears a screen, and writes a line of JSON."""
AS_IT_IS = {"commands/cat.py": 3, "commands/logs.py": 1}
"""Bytes that are copied, and not text that is said: off a terminal alone."""


def test_a_name_with_a_newline_is_one_id(tmp_path, call):
    for name in ("checkpoint-5", "checkpoint-9\ncheckpoint-5"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").write_text("{}", encoding="utf-8")
        (tmp_path / name / "model.safetensors").touch()
    told = call("ckpt", "ls", tmp_path, "-q").stdout.splitlines()
    assert sorted(told) == [f"{tmp_path}/checkpoint-5", f"{tmp_path}/checkpoint-9\\ncheckpoint-5"]


def test_all_text_goes_one_way():
    assert output.put
    found = {}
    for path in sorted(SOURCES.rglob("*.py")):
        name = path.relative_to(SOURCES).as_posix()
        if name.startswith("templates/"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _writes(ast.unparse(node.func)):
                found[name] = found.get(name, 0) + 1
    assert found == THE_WAY | AS_IT_IS


def _writes(called):
    is_stream = re.fullmatch(r"(?:self\._)?(?:sys\.)?(?:stdout|stderr|stream)\S*\.write", called)
    return bool(is_stream) or called in ("print", "typer.echo", "click.echo", "typer.secho")
