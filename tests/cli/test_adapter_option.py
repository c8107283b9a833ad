"""`resilient train --adapter` refuses in one line what it cannot add."""

import importlib.util

import pytest


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("raise SystemExit(3)")
    return str(path)


def one_line(outcome):
    line, hint = outcome.stderr.splitlines()
    assert hint.startswith("  hint: ")
    return line


def test_an_unknown_adapter_is_refused(call, script, monkeypatch):
    outcome = call("train", "--adapter", "keras", script)
    assert outcome.status == 78
    assert one_line(outcome) == (
        "error: --adapter keras is unknown; nothing was started  [RES-CONFIG]"
    )
    monkeypatch.setenv("RESILIENT_ADAPTER", "keras")
    assert call("train", script).stderr == outcome.stderr


def test_an_adapter_of_a_program_is_refused(call):
    outcome = call("train", "--adapter", "transformers", "--no-python", "true")
    assert outcome.status == 2
    assert "--adapter contradicts --no-python" in one_line(outcome)


def test_an_adapter_without_its_package_is_refused(call, script, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    outcome = call("train", "--adapter", "transformers", script)
    assert outcome.status == 78
    assert "needs Transformers, which is not installed" in one_line(outcome)
