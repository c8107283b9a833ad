"""A rendered Job runs: preempted pods are replaced and count nothing, and a bug ends it at once.

BOX_PREEMPTIONS=20 SEED=1 preempts a longer run; `make box`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import pytest
from canonical_job import digest
from host_jobs import SCRIPT, audited
from one_box import Box, action_for

from resilient.exit_codes import PERMANENT
from resilient_cli.kubernetes.manifests import manifests
from resilient_cli.kubernetes.run import Flavor, KubeRun
from tests.services import netns

PREEMPTIONS = int(os.environ.get("BOX_PREEMPTIONS", "1"))
STEPS = 5 + 4 * (PREEMPTIONS - 1)
JOB = {"max_steps": STEPS}
PODS = 2


@pytest.fixture
def network():
    if problem := netns.why_impossible():
        pytest.skip(problem)
    with netns.Network(PODS) as made:
        yield made


@pytest.fixture
def box(network, tmp_path):
    """Return the Job that runs a script, ready to be entered."""

    def made(script, *arguments, pods=PODS):
        own = ("--rdzv-conf", "last_call_timeout=1", str(script), *arguments)
        run = KubeRun("train", "image", own, 1, pods)
        (job,) = (one for one in manifests(run, Flavor.JOB) if one["kind"] == "Job")
        instead = {
            **dict.fromkeys(("HOME", "XDG_CACHE_HOME", "HF_HOME"), str(tmp_path)),
            **dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), str(tmp_path)),
            "TMPDIR": os.environ.get("TMPDIR", "/tmp"),  # noqa: S108 - this machine's
            "RESILIENT_REPO": "",
        }
        return Box(network, job, tmp_path, instead)

    return made


def steps(folder):
    path = folder / "beats"
    return len(path.read_text().split()) if path.exists() else 0


@pytest.fixture
def calm(tmp_path):
    """Return what waits for the digest of the run when nothing happens to it."""
    command = [sys.executable, str(SCRIPT), "sizes", str(tmp_path / "calm"), "1", json.dumps(JOB)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # Beside the other, for both mostly wait.
    with subprocess.Popen(command, **pipes) as process:

        def wait():
            said, complained = process.communicate()
            assert process.returncode == 0, complained
            return json.loads(said)["1"]

        yield wait
        process.kill()


def test_preempted_pods_come_back_and_the_bits_are_the_same(box, calm, tmp_path):
    drawn = random.Random(int(os.environ.get("SEED", "1")))
    folder = tmp_path / "run"
    folder.mkdir()
    with box(SCRIPT, "rank", str(folder), "0.1", json.dumps(JOB)) as cluster:
        for nth in range(PREEMPTIONS):
            until = steps(folder) + drawn.randint(1, 3)
            cluster.turn_until(lambda until=until: steps(folder) >= until, f"{until} steps")
            assert not cluster.state, cluster.said()
            # The first one is the pod that all others meet at.
            victim = drawn.choice(list(cluster.pods)) if nth else 0
            before = len(cluster.ends)
            cluster.preempt(victim)
            cluster.turn_until(lambda before=before: len(cluster.ends) > before, "its end")
        cluster.turn_until(lambda: False, "the end of the run")
        assert (cluster.state, cluster.failures) == ("Complete", 0), cluster.said()
    assert len([one for one in cluster.ends if one[2] == "Ignore"]) >= PREEMPTIONS
    assert audited(folder)["proven"]
    assert digest(folder) == calm()


def test_a_script_with_a_bug_in_its_configuration_ends_the_job_at_once(box, tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text("import sys; sys.exit(78)\n")
    with box(script, pods=1) as cluster:
        cluster.turn_until(lambda: False, "the end of the run")
    assert cluster.state == "Failed"
    assert cluster.ends == [(0, 78, "FailJob")]


@pytest.mark.parametrize(
    ("code", "disrupted", "action"),
    [
        *((code, False, "FailJob") for code in PERMANENT),
        *((code, True, "Ignore") for code in (1, 70, 137, 143)),
        (75, False, "Ignore"),
        *((code, False, "Count") for code in (1, 69, 71, 73, 80, 137, 143)),
    ],
)
def test_what_becomes_of_a_pod(code, disrupted, action):
    (job,) = (
        one
        for one in manifests(KubeRun("train", "image", ("t.py",)), Flavor.JOB)
        if one["kind"] == "Job"
    )
    assert action_for(job["spec"]["podFailurePolicy"]["rules"], code, disrupted=disrupted) == action
