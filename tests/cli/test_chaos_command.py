"""``resilient chaos``: what it lists, plans and refuses; the real thing is in tests/process."""

from __future__ import annotations

import json

import pytest

from resilient.format.keys import CheckpointId
from resilient.testing.chaos.capabilities import MachineCapabilities
from resilient.testing.chaos.plan import (
    FaultKind,
    Injection,
    PlannedFault,
    draw_injections,
    read_plan,
)
from resilient.testing.chaos.runner import ChaosExperiment
from resilient.testing.chaos.verdict import (
    ExperimentResult,
    HostEnd,
    InjectionResult,
    RunResult,
    evaluate_guarantees,
)
from resilient_cli.commands.chaos import verdict
from resilient_cli.output import Format, Output, show

TRAIN = ("--", "train", "train.py", "--output-dir", "{folder}")


@pytest.mark.parametrize(
    ("name", "options"), [("chaos-plan", ()), ("chaos-plan-json", ("--json",))]
)
def test_a_plan_is_printed_and_nothing_is_done(name, options, call, matches, tmp_path):
    ended = call("chaos", "run", "mixed", "--seed", "7", "--dry-run", *options, *TRAIN)
    matches(name, ended, tmp_path)


@pytest.fixture
def any_machine(monkeypatch):
    """Let this machine have all that it takes."""
    looked = "resilient_cli.commands.chaos.look_at_machine"
    monkeypatch.setattr(looked, lambda *_: MachineCapabilities())


@pytest.mark.usefixtures("any_machine")
@pytest.mark.parametrize(
    ("name", "options"), [("chaos-plan-hosts", ()), ("chaos-plan-hosts-json", ("--json",))]
)
def test_a_plan_for_hosts_says_which_of_them(name, options, call, matches, tmp_path):
    words = ("cuts", "--hosts", "3", "--seed", "7", "--dry-run", *options)
    ended = call("chaos", "run", *words, *TRAIN)
    matches(name, ended, tmp_path)


def test_hosts_that_this_machine_cannot_have_are_refused(call, monkeypatch):
    looked = "resilient_cli.commands.chaos.look_at_machine"
    monkeypatch.setattr(looked, lambda *_: MachineCapabilities(hosts="only root may"))
    ended = call("chaos", "run", "kills", "--hosts", "2", *TRAIN)
    assert (ended.status, ended.stdout) == (78, "")
    assert "--hosts 2: only root may" in ended.stderr
    plans = json.loads(call("chaos", "list", "--json").stdout)["plans"]
    lacks = {one["name"]: one["impossible"] for one in plans}
    assert lacks["cuts"] == {"cut": "only root may", "kill of a host": "only root may"}
    assert not lacks["kills"]


def test_the_seed_that_was_drawn_is_part_of_the_command(call):
    ended = call("chaos", "run", "kills", "--dry-run", "--json", *TRAIN)
    document = json.loads(ended.stdout)
    assert f"--seed {document['seed']} -- train" in document["command"]
    drawn = [round(one.share, 4) for one in draw_injections(read_plan("kills"), document["seed"])]
    assert [one["at"] for one in document["faults"]] == drawn


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("kills",), 2, "needs a training to inject faults into"),
        (("kills", "--", "report", "runs/x"), 2, "needs a training to inject faults into"),
        (("kils", *TRAIN), 78, "no plan `kils`: there are calm"),
        (("kills", "--", "train", "--repo", "x", "t.py"), 78, "--repo: each of the two runs"),
        (("kills", "--", "train", "--resume", "never", "t.py"), 78, "--resume: the run under"),
        (("kills", "--", "train", "--nnodes=1:2", "t.py"), 78, "--nnodes: chaos starts one host"),
        (("cuts", *TRAIN), 78, "`cut`: it applies to one of several hosts: chaos run --hosts 2"),
        (("kills", "--hosts", "0", *TRAIN), 2, "--hosts"),
        (
            ("preemptions", "--", "train", "--notice", "aws", "t.py"),
            78,
            "`notice`: the command has its own --notice",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(words, status, said, call, tmp_path):
    ended = call("chaos", "run", *words)
    assert ended.status == status, ended.stderr
    assert said in ended.stderr
    assert ended.stdout == ""


def test_options_of_the_script_are_the_scripts(call):
    ended = call("chaos", "run", "kills", "--dry-run", "--", "train", "t.py", "--repo", "x")
    assert ended.status == 0, ended.stderr


def test_what_was_given_is_given_again(call, tmp_path):
    options = ("--folder", str(tmp_path / "two words"), "--within", "90.5", "--seed", "3")
    ended = call("chaos", "run", "kills", "--dry-run", *options, *TRAIN)
    told = f"kills --folder '{tmp_path}/two words' --within 90.5 --seed 3 -- train"
    assert told in ended.stdout.replace("\n", " ")


def test_all_shipped_plans_are_listed(call):
    ended = call("chaos", "list", "--json")
    plans = {one["name"]: one for one in json.loads(ended.stdout)["plans"]}
    assert plans["calm"]["faults"] == 0
    assert plans["kills"]["impossible"] == {}
    assert call("chaos", "list", "-q").stdout.split() == sorted(plans)


@pytest.mark.parametrize(
    ("name", "how"), [("chaos-verdict", Format.HUMAN), ("chaos-verdict-json", Format.JSON)]
)
def test_a_verdict_names_what_broke_and_how_to_see_it_again(
    name, how, call, matches, tmp_path, capsys
):
    struck = InjectionResult(
        Injection(PlannedFault(FaultKind.PREEMPT), 0.5, 0.5, 1),
        "SIGTERM to the job",
        23,
        code=75,
        codes=(75, 0),
        is_new_life=True,
        before=CheckpointId(1, 20),
        after=CheckpointId(1, 23),
        restored=CheckpointId(1, 23),
        seconds=2.25,
    )
    missed = Injection(PlannedFault(FaultKind.STOP, seconds=5.0), 0.9, 0.5, 1)
    ended = RunResult(0, step=40, differences=("/model/w: tensor(1.) and tensor(2.)",), flaws=())
    calm = RunResult(0, step=40, steps=(10, 20, 30, 40))
    evidence = ExperimentResult(calm, ended, (struck,), (missed,))
    wish = ChaosExperiment(read_plan("preemptions"), 7, ("train.py",), tmp_path)
    again = "resilient chaos run preemptions --seed 7 -- train train.py"
    show(verdict(wish, evidence, evaluate_guarantees(evidence), again), Output(how, color=False))
    said = capsys.readouterr()
    outcome = type(call("chaos", "list", "-q"))(1, said.out, "")
    matches(name, outcome, tmp_path)


def test_a_verdict_on_hosts_says_whose_agents_ended(call, matches, tmp_path, capsys):
    struck = InjectionResult(
        Injection(PlannedFault(FaultKind.CUT, seconds=30.0), 0.5, 0.5, 1),
        "host-0 cut off for 30 s",
        23,
        is_new_life=True,
        before=CheckpointId(1, 20),
        after=CheckpointId(2, 30),
        due=CheckpointId(1, 20),
        restored=CheckpointId(1, 20),
        seconds=12.5,
        host=0,
        ends=(HostEnd(1, 69, (69,)), HostEnd(2, 1, (69,))),
    )
    calm = RunResult(0, step=40, steps=(10, 20, 30, 40), worlds=(3,))
    ended = RunResult(0, step=40, flaws=(), worlds=(3, 1, 3))
    evidence = ExperimentResult(calm, ended, (struck,))
    wish = ChaosExperiment(read_plan("cuts"), 7, ("train.py",), tmp_path, hosts=3)
    again = "resilient chaos run cuts --hosts 3 --seed 7 -- train train.py"
    show(
        verdict(wish, evidence, evaluate_guarantees(evidence), again),
        Output(Format.HUMAN, color=False),
    )
    said = capsys.readouterr()
    matches("chaos-verdict-hosts", type(call("chaos", "list", "-q"))(1, said.out, ""), tmp_path)
