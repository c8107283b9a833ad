"""``resilient config``: files of arguments, what a checkpoint was trained with, the schema."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from dataclasses import fields

import jsonschema
import pytest

from resilient.train.arguments.arguments import TrainingArguments
from resilient.train.arguments.value_types import is_secret
from tests.helpers.cli_repositories import write_usual_run

GOOD = """output_dir = "runs/mine"
learning_rate = 3e-4
load_best_model_at_end = true
eval_strategy = "steps"
save_strategy = "steps"
hub_token = "s3cr3t"
"""


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "train.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def schema(call):
    return json.loads(call("config", "schema").stdout)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("config-show", ("show",)),
        ("config-show-json", ("show", "--json")),
        ("config-check", ("check",)),
        ("config-check-json", ("check", "--json")),
    ],
)
def test_what_is_said_of_a_file(name, words, file, call, matches, tmp_path):
    outcome = call("config", words[0], file(GOOD), *words[1:])
    assert outcome.status == 0
    assert "s3cr3t" not in outcome.stdout + outcome.stderr
    matches(name, outcome, tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config-unknown", 'output_dir = "a"\nlearning_rat = 1e-4\n'),
        ("config-wrong", "learning_rate = 1e-4\nmax_steps = true\n"),
        ("config-against", 'load_best_model_at_end = true\neval_strategy = "no"\n'),
    ],
)
def test_what_is_not_accepted_is_78_with_its_line(name, text, file, call, matches, tmp_path):
    outcome = call("config", "check", file(text))
    assert outcome.status == 78
    matches(name, outcome, tmp_path)


def test_all_arguments_are_shown_with_their_defaults(file, call):
    shown = json.loads(call("config", "show", file(GOOD), "--all", "--json").stdout)["settings"]
    by_name = {one["name"]: one for one in shown}
    secret = {one.name for one in fields(TrainingArguments) if is_secret(one)}
    assert set(by_name) == {one.name for one in fields(TrainingArguments) if one.init} - secret
    assert by_name["metric_for_best_model"]["origin"] == "follows from others"
    assert by_name["weight_decay"]["origin"] == "default"


def test_a_checkpoint_s_arguments_are_shown(tmp_path, call):
    write_usual_run(tmp_path)
    shown = json.loads(call("config", "show", "latest", tmp_path, "--json").stdout)
    assert shown["settings"]
    assert all(one["origin"].startswith("checkpoint-") for one in shown["settings"])


def test_the_schema_takes_what_a_run_takes(schema):
    jsonschema.Draft202012Validator.check_schema(schema)
    checker = jsonschema.Draft202012Validator(schema)
    said = tomllib.loads(GOOD)
    checker.validate(said)
    checker.validate({"report_to": ["tensorboard"], "max_grad_norm": 1, "seed": 3})
    properties = schema["properties"]
    defaults = {name: one["default"] for name, one in properties.items() if "default" in one}
    checker.validate(defaults)


@pytest.mark.parametrize(
    "wrong",
    [
        {"learning_rat": 1e-4},
        {"max_steps": "many"},
        {"eval_strategy": "sometimes"},
        {"report_to": ["nobody"], "include_for_metrics": ["everything"]},
        {"optim": "adamw_torc"},
    ],
)
def test_the_schema_refuses_what_a_run_refuses(wrong, schema):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema)


def test_no_torch_is_imported(file):
    code = (
        "import sys; from resilient_cli.app import main; main(sys.argv[1:]);"
        "sys.exit('torch' in sys.modules)"
    )
    words = ["config", "check", str(file(GOOD))]
    subprocess.run([sys.executable, "-c", code, *words], check=True, capture_output=True)
