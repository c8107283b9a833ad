"""``resilient ckpt diff``: transcripts, exit codes, references, and checkpoints of other tools."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from resilient_cli.output import Progress
from tests.helpers.cli_repositories import TickingClock, write_usual_run
from tests.helpers.drifting_runs import write_drifting_run

GOLDEN = Path(__file__).parents[1] / "golden" / "transformers"


@pytest.fixture
def run(tmp_path):
    write_usual_run(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def drifted(tmp_path):
    write_drifting_run(tmp_path / "drifted")
    return tmp_path / "drifted"


@pytest.fixture
def theirs(tmp_path):
    return Path(shutil.copytree(GOLDEN / "gpt2_all" / "run", tmp_path / "theirs"))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("diff", ()),
        ("diff-json", ("--json",)),
        ("diff-plain", ("--format", "plain")),
        ("diff-quiet", ("-q",)),
        ("diff-only", ("--only", "*.bias", "--exit-code")),
    ],
)
def test_two_steps_of_a_run(name, options, drifted, call, matches):
    matches(name, call("ckpt", "diff", "step:10", "latest", drifted, *options), drifted)


def test_nothing_differs_from_itself(drifted, call, matches):
    outcome = call("ckpt", "diff", "step:20", "latest", drifted, "--exit-code")
    matches("diff-same", outcome, drifted)


def test_a_checkpoint_of_transformers_that_went_on(theirs, call, matches):
    later = Path(shutil.copytree(theirs / "checkpoint-8", theirs / "checkpoint-9"))
    optimizer = torch.load(later / "optimizer.pt", weights_only=True)
    for number in range(12):
        optimizer["state"][number]["exp_avg_sq"] *= number
    optimizer["state"][0]["exp_avg"][0] = float("nan")
    torch.save(optimizer, later / "optimizer.pt")
    state = json.loads((later / "trainer_state.json").read_text())
    state["global_step"], state["log_history"] = 9, state["log_history"][:3]
    (later / "trainer_state.json").write_text(json.dumps(state))
    pair = (theirs / "checkpoint-8", later)
    matches("diff-theirs", call("ckpt", "diff", *pair), theirs)
    every = call("ckpt", "diff", *pair, "--all").stdout
    assert every.count("optimizer/") == 12
    assert "more in optimizer" not in every


def test_one_of_ours_against_one_of_theirs_says_what_only_one_has(drifted, theirs, call):
    pair = (theirs / "checkpoint-8", drifted / "latest")
    outcome = call("ckpt", "diff", *pair, "--json", "--exit-code")
    answer = json.loads(outcome.stdout)
    assert outcome.status == 1
    assert (answer["before"]["layout"], answer["after"]["layout"]) == ("hf-trainer", "resilient")
    assert len(answer["only_before"]) == 28
    assert "numbers on one side and names on the other" in answer["notes"][0]


@pytest.mark.parametrize(
    "words",
    [
        ("latest~1", "latest", "RUN"),
        ("RUN/latest~1", "RUN/latest"),
        ("RUN/step:25", "RUN"),
        ("RUN/checkpoint-25-g2", "RUN/checkpoint-35-g2"),
        ("latest~1", "latest", "--repo", "RUN"),
    ],
)
def test_a_checkpoint_has_many_names(words, run, call):
    outcome = call("ckpt", "diff", *(word.replace("RUN", str(run)) for word in words), "--json")
    answer = json.loads(outcome.stdout)
    named = (answer["before"]["checkpoint"], answer["after"]["checkpoint"])
    assert named == ("checkpoint-25-g2", "checkpoint-35-g2")
    assert outcome.status == 0


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("RUN/step:77", "RUN"), 66),
        (("RUN", "RUN/nowhere"), 66),
        (("RUN",), 2),
        (("RUN", "RUN", "--only", "nothing*"), 2),
        (("RUN", "THEIRS"), 65),
    ],
)
def test_what_is_no_checkpoint_has_the_exit_code_of_the_table(words, status, run, theirs, call):
    places = {"RUN": str(run), "THEIRS": str(theirs)}
    given = [
        word.replace("RUN", places["RUN"]).replace("THEIRS", places["THEIRS"]) for word in words
    ]
    assert call("ckpt", "diff", *given).status == status


def test_names_from_a_file_move_no_cursor(tmp_path, call):
    for number in range(2):
        torch.save({"\x1b]0;owned\x07": torch.ones(2) * number}, tmp_path / f"{number}.pt")
    outcome = call("ckpt", "diff", tmp_path / "0.pt", tmp_path / "1.pt")
    assert "owned" in outcome.stdout
    assert "\x1b" not in outcome.stdout


def test_lines_are_short_but_for_names(drifted, call):
    lines = call("ckpt", "diff", "step:10", "latest", drifted).stdout.splitlines()
    assert [line for line in lines if len(line) > 72 and str(drifted) not in line] == []


def test_commands_that_only_list_do_not_pay_for_the_others():
    code = (
        "import sys; from resilient_cli.app import main; main(['ckpt', 'ls', '--help']); "
        "sys.exit(sum(one in sys.modules for one in ('numpy', 'resilient.layouts', "
        "'resilient_cli.commands.diff', 'resilient_cli.commands.repair')))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert done.returncode == 0


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_is_drawn_on_a_terminal_and_taken_away():
    stream = Terminal()
    with Progress("comparing", TickingClock(), stream) as told:
        told(1 << 20, 2 << 20)
        assert stream.getvalue() == ""
        told._clock.sleep(1)
        told(1 << 20, 2 << 20)
        assert "comparing [##########          ] 1.0 MiB of 2.0 MiB" in stream.getvalue()
    assert stream.getvalue().endswith("\r")


def test_off_a_terminal_a_line_is_said_at_times():
    stream = io.StringIO()
    with Progress("comparing", TickingClock(), stream) as told:
        for _ in range(5):
            told._clock.sleep(1)
            told(1, 2)
    assert stream.getvalue() == "comparing 50 %, 1 B of 2 B\n" * 5


def test_the_configuration_of_a_model_that_was_taken_over_is_the_same(theirs, call, tmp_path):
    ours = tmp_path / "ours"
    assert call("ckpt", "import", theirs / "checkpoint-8", ours).status == 0
    outcome = call("ckpt", "diff", theirs / "checkpoint-8", ours, "--json")
    fields = json.loads(outcome.stdout)["fields"]
    assert not [one for one in fields if one["section"] == "model_config"]
    document = ours / "checkpoint-8-g1" / "config.json"
    document.write_text(document.read_text().replace('"n_layer": 2', '"n_layer": 3'))
    outcome = call("ckpt", "diff", theirs / "checkpoint-8", ours, "--json")
    fields = json.loads(outcome.stdout)["fields"]
    assert [one["name"] for one in fields if one["section"] == "model_config"] == ["n_layer"]


def test_what_no_reader_understands_is_no_silent_agreement(theirs, call, matches):
    later = Path(shutil.copytree(theirs / "checkpoint-8", theirs / "checkpoint-9"))
    pair = (theirs / "checkpoint-8", later)
    schedule = torch.load(later / "scheduler.pt", weights_only=True)
    for folder, number in zip(pair, (1, 2), strict=True):
        torch.save({"scale": float(number)}, folder / "scaler.pt")
        torch.save({**schedule, "phases": {number}}, folder / "scheduler.pt")
    matches("diff-opaque", call("ckpt", "diff", *pair, "--exit-code"), theirs)
    answer = json.loads(call("ckpt", "diff", *pair, "--json").stdout)
    places = [one["place"] for one in answer["not_understood"]]
    assert places == ["scaler.pt: scale", "scheduler.pt: phases"]
