"""``resilient help json``: a schema for whatever ``--json`` writes, and no schema without use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from resilient_cli.app import main
from resilient_cli.command_tree import COMMANDS
from resilient_cli.commands.help import schema_document, schema_names
from tests.helpers.cli_repositories import write_usual_run
from tests.helpers.json_schemas import check, check_output, documents, validator

HERE = Path(__file__).parent
TRANSCRIPTS = {
    path.stem: text
    for path in sorted((HERE / "transcripts").glob("*.txt"))
    if '"schema": "' in (text := path.read_text(encoding="utf-8"))
}

# Written by a command for what it was not made for: a checkpoint of another tool, a failure.
BESIDES = {
    "ckpt.inspect-foreign",
    "ckpt.ls-foreign",
    "ckpt.repair-foreign",
    "ckpt.verify-foreign",
    "error",
}

# What differs from machine to machine, or needs one that is prepared: the `call` of these tests
# holds whatever it is answered against the schema.
ELSEWHERE = {
    "ckpt.verify-foreign": "test_inspect_foreign.py",
}
HERE_MADE = {
    "error": ("ckpt", "ls", "RUN/none"),
}


def leaves(commands, above=()):
    """Yield the dotted name of every command that answers."""
    for name, lazy in commands.items():
        at = (*above, name)
        if lazy.commands:
            yield from leaves(lazy.commands, at)
        elif lazy.attribute == "app":
            module = __import__(lazy.module, fromlist=["app"])
            group = typer.main.get_group(module.app)
            yield from (".".join((*at, one)) for one in group.commands)
        else:
            yield ".".join(at)


def test_every_command_has_a_schema_and_every_schema_a_command():
    assert set(schema_names()) - BESIDES == set(leaves(COMMANDS))
    assert set(schema_names()) >= BESIDES


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_a_transcript_is_as_the_schema_says(name):
    assert check_output(TRANSCRIPTS[name])


def test_every_schema_is_used():
    used = {one for text in TRANSCRIPTS.values() for one in check_output(text)}
    assert used | set(HERE_MADE) | set(ELSEWHERE) == set(schema_names())
    assert not used & (set(HERE_MADE) | set(ELSEWHERE)), "it has a transcript now"
    for file in ELSEWHERE.values():
        assert '"--json"' in (HERE / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", HERE_MADE)
def test_an_answer_is_as_the_schema_says(name, call, tmp_path, monkeypatch):
    write_usual_run(tmp_path / "run")
    monkeypatch.setenv("RESILIENT_SIGNING_KEY", "k" * 32)
    call("ckpt", "tag", "latest", "release", tmp_path / "run")
    words = [one.replace("RUN", str(tmp_path / "run")) for one in HERE_MADE[name]]
    if name == "ckpt.undo":
        call("ckpt", "rollback", "step:30", tmp_path / "run")
    outcome = call("--json", *words)
    (found,) = documents(outcome.stdout + outcome.stderr)
    assert check(found) == name


@pytest.mark.parametrize("name", schema_names())
def test_a_schema_is_strict_enough_to_mean_something(name):
    made = schema_document(name)
    assert made["title"] == f"resilient/{name}@1"
    assert made["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    kinds = made.get("oneOf", [made])
    for kind in kinds:
        assert {"schema", "type"} < set(kind["required"]) <= set(kind["properties"])
        assert kind["properties"]["schema"] == {"const": f"resilient/{name}@1"}
        assert kind.get("additionalProperties", True) is True
    assert len({kind["properties"]["type"]["const"] for kind in kinds}) == len(kinds)
    assert not validator(name).is_valid({"schema": f"resilient/{name}@1"})


def test_a_field_of_another_type_one_less_and_another_kind_are_seen():
    (good,) = documents(TRANSCRIPTS["tag-json"])
    assert check({**good, "more": 1}) == "ckpt.tag"
    less = {name: value for name, value in good.items() if name != "undo"}
    for bad in ({**good, "id": 7}, {**good, "type": "object"}, less):
        with pytest.raises(AssertionError, match=r"help json ckpt\.tag"):
            check(bad)


def test_help_json_lists_schemas_and_shows_one(call):
    assert set(json.loads(call("help", "json", "--json").stdout)["schemas"]) == set(schema_names())
    shown = call("help", "json", "ckpt.ls")
    assert json.loads(shown.stdout) == schema_document("ckpt.ls")
    assert call("help", "json", "ckpt", "ls").stdout == shown.stdout
    said = json.loads(call("help", "json", "ckpt.ls", "--json").stdout)
    assert (said["type"], said["document"]) == ("schema", schema_document("ckpt.ls"))
    wrong = call("help", "json", "ckpt.lss")
    assert wrong.status == 2
    assert "hint: resilient help json ckpt.ls\n" in wrong.stderr


def test_the_command_line_loads_no_validator(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jsonschema", None)
    assert main(["help", "json", "ckpt.ls"]) == 0
