"""A rendered Job: whatever becomes of its pods, it ends with the same bits; a bug ends it at once.

BOX_PREEMPTIONS=20 SEED=1 preempts a longer run, and has the runs that take minutes; `make box`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from typing import NamedTuple

import pytest

from resilient_cli.kubernetes.manifests import manifests
from resilient_cli.kubernetes.spec import Flavor, KubeRun
from tests.helpers.one_box import Box
from tests.process.canonical_job import digest
from tests.process.host_jobs import SCRIPT, audited
from tests.services import netns
from tests.services.presence import require

PREEMPTIONS = int(os.environ.get("BOX_PREEMPTIONS", "1"))
SEED = int(os.environ.get("SEED", "1"))
MOST = 4
# Each with the steps to make before it.


class Course(NamedTuple):
    """What becomes of the pods of a run, one after the other.

    Attributes:
        pods: at the start.
        failures: that the Job counts.
        acts: each with the steps to make before it.
    """

    pods: int
    failures: int
    acts: list[tuple[object, ...]]


SHORT = Course(2, 0, [(1, "preempt", 0), (1, "scale", 1)])
RANDOM = Course(2, 0, [])
_drawn = random.Random(SEED)
for _nth in range(PREEMPTIONS):
    # The first one is the pod that all others meet at.
    RANDOM.acts.append((_drawn.randint(1, 3), "preempt", _drawn.randrange(2) if _nth else 0))
IN_MANY_WAYS = Course(
    2,
    # A pod that is killed for no reason that is told. One that lost pod 0 waits for the next.
    1,
    [
        (2, "lose", 0),
        (2, "drain"),
        (2, "delete", 0),
        (2, "kill", 0),
        (2, "lose", 1),
    ],
)
# There is no node for pod 0 for longer than torch waits for it.
LATE = Course(2, 0, [(2, "preempt", 0, 30.0)])
RESIZED = Course(
    4,
    0,
    [(2, "scale", 2), (2, "scale", 3), (2, "preempt", 2), (2, "drain"), (2, "scale", 4)],
)
IS_LONG = pytest.mark.skipif(PREEMPTIONS == 1, reason="takes minutes: make box")


@pytest.fixture
def network():
    require("netns", netns.why_impossible())
    with netns.Network(MOST) as made:
        yield made


@pytest.fixture
def box(network, tmp_path):
    """Return the Job that runs a script, ready to be entered."""

    def made(*command, pods):
        run = KubeRun("train", "image", tuple(map(str, command)), 1, pods)
        (job,) = (one for one in manifests(run, Flavor.JOB) if one["kind"] == "Job")
        _hurry(job)
        instead = {
            **dict.fromkeys(("HOME", "XDG_CACHE_HOME", "HF_HOME"), str(tmp_path)),
            **dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), str(tmp_path)),
            "TMPDIR": os.environ.get("TMPDIR", "/tmp"),  # noqa: S108 - this machine's
            "RESILIENT_REPO": "",
        }
        return Box(network, job, tmp_path, instead)

    return made


def _hurry(job):
    """Let the pods of a Job wait for each other in seconds."""
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (conf,) = (one for one in container["args"] if one.startswith("--rdzv-conf="))
    at = container["args"].index(conf)
    container["args"][at] = f"{conf},last_call_timeout=1,read_timeout=5"


def steps(folder):
    path = folder / "beats"
    return len(path.read_text().split()) if path.exists() else 0


@pytest.fixture
def told(capsys):
    """Return what shows figures to whoever asked for a long run."""

    def tell(figures):
        if PREEMPTIONS > 1:
            with capsys.disabled():
                sys.stdout.write(f"\n{json.dumps(figures)}\n")

    return tell


@pytest.fixture
def calm(tmp_path):
    """Return what starts the run that nobody disturbs; that returns what waits for its digest."""
    started = []

    def start(job):
        # Beside the other, for both mostly wait.
        command = [sys.executable, str(SCRIPT), "sizes", str(tmp_path / "calm"), "1", job]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, **pipes)
        started.append(process)

        def wait():
            said, complained = process.communicate()
            assert process.returncode == 0, complained
            return json.loads(said)["1"]

        return wait

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    "course",
    [
        pytest.param(SHORT, id="short"),
        pytest.param(RANDOM, id="preempted", marks=IS_LONG),
        pytest.param(IN_MANY_WAYS, id="in-many-ways", marks=IS_LONG),
        pytest.param(LATE, id="late", marks=IS_LONG),
        pytest.param(RESIZED, id="resized", marks=IS_LONG),
    ],
)
def test_whatever_becomes_of_its_pods_a_run_ends_with_the_same_bits(
    box, calm, tmp_path, told, course
):
    began, folder = time.monotonic(), tmp_path / "run"
    folder.mkdir()
    job = json.dumps({"max_steps": 2 + sum(2 + one[0] for one in course.acts)})
    undisturbed = calm(job)
    with box(SCRIPT, "rank", folder, "0.1", job, pods=course.pods) as cluster:
        for more, what, *about in course.acts:
            until, before = steps(folder) + more, len(cluster.ends)
            cluster.turn_until(lambda until=until: steps(folder) >= until, f"{until} steps")
            assert not cluster.state, cluster.said()
            getattr(cluster, what)(*about)
            if what != "scale":
                cluster.turn_until(lambda before=before: len(cluster.ends) > before, "its end")
        cluster.turn_until(lambda: False, "the end of the run")
    seconds = round(time.monotonic() - began)
    told({"acts": len(course.acts), "seconds": seconds, **cluster.figures(), "ends": cluster.ends})
    assert (cluster.state, cluster.failures) == ("Complete", course.failures), cluster.said()
    assert audited(folder)["proven"]
    assert digest(folder) == undisturbed()


@pytest.mark.slow
def test_a_script_with_a_bug_in_its_configuration_ends_the_job_at_once(box, tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text("import sys; sys.exit(78)\n")
    with box(script, pods=1) as cluster:
        cluster.turn_until(lambda: False, "the end of the run")
        assert (cluster.state, cluster.controller.reason) == ("Failed", "PodFailurePolicy")
    assert cluster.ends == [(0, 78, "FailJob")]


@IS_LONG
def test_a_script_that_raises_each_time_ends_the_job(box, tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text("raise TypeError('a bug')\n")
    with box("--repo", tmp_path / "run", script, pods=2) as cluster:
        cluster.turn_until(lambda: False, "the end of the run")
        assert (cluster.state, cluster.controller.reason) == ("Failed", "PodFailurePolicy")
    assert {code for _, code, action in cluster.ends if action == "FailJob"} == {70}
    assert len(cluster.ends) == 2
