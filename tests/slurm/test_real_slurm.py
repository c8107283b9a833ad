"""A real SLURM takes the nodes of a run and starts it again: the bits are those of a calm run."""

from __future__ import annotations

import re
import time

import pytest

from tests.helpers.endings import differences, ending
from tests.helpers.pages import paste, section, shell_of
from tests.helpers.slurm_jobs import SlurmRun, calm
from tests.process.gangs import ROOT
from tests.services.presence import require
from tests.services.slurm import Slurm, why_impossible


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    require("slurm", why_impossible())
    with Slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    calm(folder)
    return ending(folder)


def outrank(cluster):
    """Have a job of a partition that goes first take both nodes."""
    wanted = ("--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null")
    cluster.run("sbatch", *wanted, "--wrap=true")


@pytest.fixture
def every(request):
    if not request.config.getoption("--every-slurm"):
        pytest.skip("minutes on a real SLURM: make slurm")


def check_whole(run, unbroken):
    """Hold a run that is done against one that was left in peace."""
    run.wait_for_state("COMPLETED")
    # Nothing was done twice: each start begins with the step after the last one.
    assert [one["step"] for one in run.lines()] == list(range(1, 161)), run.log()
    assert differences(ending(run.folder / "run"), unbroken) == []


def test_preempted_three_times_in_a_row_it_ends_with_the_same_bits(cluster, unbroken, tmp_path):
    run = SlurmRun(cluster, tmp_path, "--partition", "low", "--notice", "40")
    for number in (1, 2, 3):
        run.wait_for_steps(number - 1)
        outrank(cluster)
        run.wait_for_start(number)
    check_whole(run, unbroken)
    assert run.status()["starts"] == 3
    assert run.log().count("exit 75: saved; job") == 3
    assert len(run.starts()) == 4
    assert not list(tmp_path.glob("logs/*.failures"))


def test_what_the_page_says_ends_with_a_run_that_was_requeued(cluster, tmp_path):
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    work, said = paste(shell_of(section(page, "SLURM")), tmp_path, cluster.environment)
    log = "".join(one.read_text() for one in (work / "logs").glob("*.log"))
    assert "  exit 75: " in log
    assert re.search(r"resumed from checkpoint-\d+-g1 ", log)
    assert "COMPLETED" in said, said
    assert "Verified up to checkpoint-2000-g2" in said, said


def test_what_another_start_would_not_mend_is_not_requeued(cluster, tmp_path):
    run = SlurmRun(cluster, tmp_path, script=("nowhere.py",))
    run.wait_for_state("FAILED")
    assert run.status()["exit_code"] == 66
    assert run.status()["starts"] == 0
    assert "another start would fail in the same way" in run.log()


@pytest.mark.smoke
def test_what_is_cancelled_is_saved_and_stays_cancelled(cluster, every, tmp_path):
    run = SlurmRun(cluster, tmp_path)
    run.wait_for_steps(0)
    cluster.run("scancel", run.number)
    run.wait_for_state("CANCELLED")
    run.wait_for_word("SLURM has already ended job")
    time.sleep(3)
    assert cluster.job(run.number)["JobState"] == "CANCELLED"
    assert int(cluster.job(run.number)["Restarts"]) == 0
    assert ending(tmp_path / "run")["step"] == run.lines()[-1]["step"]


def test_a_drained_node_is_left_for_another(cluster, every, unbroken, tmp_path):
    run = SlurmRun(cluster, tmp_path)
    run.wait_for_steps(0)
    node = cluster.job(run.number)["NodeList"]
    cluster.run("scontrol", "update", f"node={node}", "state=drain", "reason=test")
    try:
        cluster.run("scontrol", "requeue", run.number)
        run.wait_for_start(1)
        check_whole(run, unbroken)
        assert {node, cluster.job(run.number)["NodeList"]} == {"n1", "n2"}
    finally:
        cluster.run("scontrol", "update", f"node={node}", "state=resume")


def test_the_end_of_the_time_is_told_and_survived(cluster, every, unbroken, tmp_path):
    # Nobody but SLURM's signal tells of it.
    run = SlurmRun(cluster, tmp_path, "--time", "2", train=("--notice", "off"), pause="0.5")
    run.wait_for_start(1)
    check_whole(run, unbroken)
    assert "time limit is near: saving, then exiting" in run.log()
    assert "exit 75: saved; job" in run.log()


def test_failures_are_counted_and_come_to_an_end(cluster, every, tmp_path):
    folder = tmp_path / "fails.py"
    folder.write_text("raise SystemExit(9)\n")
    script = ("--max-restarts", "0", str(folder))
    run = SlurmRun(cluster, tmp_path, "--max-failures", "2", script=script)
    run.wait_for_start(1)
    run.wait_for_state("FAILED")
    assert run.status()["exit_code"] == 9
    assert len(next(tmp_path.glob("logs/*.failures")).read_text().splitlines()) == 2


def test_tasks_of_an_array_are_requeued_one_by_one(cluster, every, tmp_path):
    again = tmp_path / "again.py"
    again.write_text(
        "import os, sys\n"
        "task, start = (os.environ[f'SLURM_{one}'] for one in ('ARRAY_TASK_ID', 'JOB_ID'))\n"
        "mark = f'{sys.argv[1]}/was-{task}'\n"
        "is_first = not os.path.exists(mark)\n"
        "open(mark, 'a').write('x')\n"
        "sys.exit(75 if is_first and task == '1' else 0)\n"
    )
    script = (str(again), str(tmp_path), "{task}")
    run = SlurmRun(cluster, tmp_path, "--array", "0-1", script=script)
    task = f"{run.number}_1"
    run.wait(lambda: int(cluster.job(task)["Restarts"]) == 1, "no requeue")
    run.wait(lambda: cluster.job(task)["JobState"] == "COMPLETED", "no end")
    assert [(tmp_path / f"was-{one}").read_text() for one in (0, 1)] == ["x", "xx"]


def test_an_elastic_run_goes_on_without_a_node_that_died(cluster, every, tmp_path):
    # Both nodes are this machine, and their names are SLURM's alone.
    names = tmp_path / "names"
    names.mkdir()
    (names / "scontrol").write_text(
        '#!/bin/sh\n[ "$2" = hostnames ] && exec echo 127.0.0.1\nexec /usr/bin/scontrol "$@"\n'
    )
    (names / "scontrol").chmod(0o755)
    setup = ("--setup", f"export PATH={names}:$PATH")
    # The first node serves the rendezvous, and here both have its address.
    first = '[ "${SLURM_PROCID:-0}" = 0 ] || sleep 3'
    run = SlurmRun(cluster, tmp_path, "--nodes", "1-2", *setup, pause="0.2", first=first)
    run.wait_for_steps(0)
    run.wait_for_word(" on 2 ranks, ")
    cluster.run("scontrol", "update", "node=n2", "state=down", "reason=test")
    try:
        run.wait_for_state("COMPLETED")
    finally:
        # It may have come back by itself.
        if "DOWN" in cluster.run("scontrol", "show", "node", "n2"):
            cluster.run("scontrol", "update", "node=n2", "state=resume")
    assert " on 1 ranks, " in run.log()
    # Nothing was saved before: what was done on two nodes is done again.
    assert [one["step"] for one in run.lines()][-160:] == list(range(1, 161)), run.log()
    assert run.status()["starts"] == 0
    assert not list(tmp_path.glob("logs/*.failures"))
