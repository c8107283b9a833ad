"""``resilient k8s status``, ``wait`` and ``logs``, by the real kubectl on a small API server."""

from __future__ import annotations

import json
import threading
import time

import pytest

from resilient.errors import ClusterUnavailable
from resilient_cli.kubernetes.kubectl import Cluster
from resilient_cli.kubernetes.status import state_of
from resilient_cli.kubernetes.watch import get_run, resources
from tests.helpers.clusters import condition, holder, pod, warning, workload
from tests.services.apirequests import TOKEN
from tests.services.apiserver import CORE, Fault

BUG = condition("Failed", "PodFailurePolicy", "Container train failed with exit code 78")
BACKOFF = condition("Failed", "BackoffLimitExceeded", "Job has reached the backoff limit")
PREEMPTED_TWICE = (pod(0, 1, code=143, is_disrupted=True), pod(0, 3, code=75), pod(0, 5))


@pytest.fixture
def seen(call, matches, tmp_path):
    """Call the program and hold what it says against a transcript."""

    def look(name, *arguments):
        ended = call("k8s", *arguments)
        assert TOKEN not in ended.stdout + ended.stderr
        assert "pw" not in ended.stdout + ended.stderr
        matches(name, ended, tmp_path)
        return ended

    return look


def put(cluster, *objects):
    return [cluster.put(one) for one in objects]


@pytest.mark.slow
def test_a_running_run_shows_preemptions_that_are_no_failures(cluster, seen):
    told = "0/3 nodes are available; see https://me:pw@host/why"
    put(cluster, holder(), *PREEMPTED_TWICE, pod(1, 1, code=1), pod(1, 6, phase="Pending", node=""))
    put(cluster, warning("gpt2-1-006", "FailedScheduling", told, count=4))
    put(cluster, warning("gpt2-big", "FailedCreate", "of another run", "Job"))
    assert seen("k8s-status", "status", "gpt2").status == 0
    document = json.loads(seen("k8s-status-json", "status", "gpt2", "--json").stdout)
    assert (document["preemptions"], document["failures"], document["exit"]) == (2, 1, None)
    assert [one["reason"] for one in document["events"]] == ["FailedScheduling"]


@pytest.mark.slow
def test_a_bug_of_the_script_is_named_by_its_code(cluster, seen):
    put(cluster, holder("job", BUG), pod(0, 1, code=69), pod(1, 1, code=78), *PREEMPTED_TWICE[:2])
    assert seen("k8s-status-failed", "status", "gpt2").status == 1
    assert seen("k8s-wait-failed", "wait", "gpt2").status == 78
    assert seen("k8s-wait-json", "wait", "gpt2", "--json").status == 78


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flavor", "word"),
    [
        ("job", "Complete"),
        ("jobset", "Completed"),
        ("trainjob", "Complete"),
        ("pytorchjob", "Succeeded"),
        ("kueue", "Complete"),
    ],
)
def test_every_flavor_is_found_and_waited_for(flavor, word, cluster, call):
    put(cluster, holder(flavor), pod(0, 1, flavor=flavor), pod(1, 1, flavor=flavor))
    document = json.loads(call("k8s", "status", "gpt2", "--json").stdout)
    assert (document["flavor"], document["state"]) == (flavor, "running")
    assert [one["index"] for one in document["pods"]] == [0, 1]
    put(cluster, holder(flavor, condition(word)), pod(0, 1, code=0), pod(1, 1, code=0))
    assert call("k8s", "wait", "gpt2", "-q").stdout == "complete\n"


@pytest.mark.slow
def test_a_run_in_a_queue_waits_and_is_not_suspended(cluster, seen, call):
    suspended = condition("Suspended", "JobSuspended")
    (job,) = put(cluster, holder("kueue", suspended, suspend=True))
    put(cluster, workload(job, condition("QuotaReserved")))
    assert seen("k8s-status-queued", "status", "gpt2").status == 0
    assert call("k8s", "wait", "gpt2", "--timeout", "0.01").status == 69
    put(cluster, workload(job, condition("Admitted")), holder("kueue"), pod(0, 1))
    assert "training: admitted" in call("k8s", "status", "gpt2").stdout


@pytest.mark.parametrize(
    ("objects", "status"),
    [
        ((holder("job", condition("Complete")), pod(0, 1, code=0), pod(0, 0, code=1)), 0),
        ((holder("job", condition("Suspended"), suspend=True), pod(0, 1, code=143)), 75),
        ((holder("pytorchjob", runPolicy={"suspend": True}),), 75),
        ((holder("job", BACKOFF), pod(0, 1, code=137), pod(0, 3, code=1), pod(0, 5, code=75)), 1),
        ((holder("job", BACKOFF), pod(0, 1, code=1), pod(1, 3, code=137)), 137),
        ((holder("job", BACKOFF), pod(0, 1, code=1), pod(1, 3, code=137, is_disrupted=True)), 1),
        ((holder("job", BUG), pod(0, 1, code=70), pod(1, 3, code=69)), 70),
        ((holder("job", condition("Failed", "DeadlineExceeded")), pod(0, 1, code=1),
          pod(0, 3, code=75)), 75),
        ((holder("jobset", condition("Failed", "FailedJobs")),), 1),
    ],
)  # fmt: skip
def test_the_exit_code_of_wait_is_that_of_the_run(objects, status):
    assert state_of(objects[0], objects[1:], None, ()).exit_code == status


@pytest.mark.slow
def test_wait_outlives_a_cut_and_a_server_that_starts_anew(cluster, call, monkeypatch):
    monkeypatch.setattr("resilient_cli.kubernetes.watch._POLL_SECONDS", 0.05)
    put(cluster, holder(), pod(0, 1))
    cluster.faults += [Fault(500, "lab/jobs", 1), Fault(410, "lab/jobs", 1), Fault(0, "/pods", 3)]

    def restart():
        while len(cluster.seen) < 20:
            time.sleep(0.01)
        cluster.stop()
        time.sleep(0.3)
        put(cluster, holder("job", condition("Complete")), pod(0, 1, code=0))
        cluster.start()

    thread = threading.Thread(target=restart)
    thread.start()
    ended = call("k8s", "wait", "gpt2", "--timeout", "60")
    thread.join(60)
    assert ended.status == 0, ended.stderr
    silent, running = "gpt2: the cluster does not answer; retrying", "gpt2: running"
    assert ended.stderr.splitlines()[:3] == [silent, running, silent]


def test_a_server_that_knows_half_of_its_resources_is_silent(cluster, monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECACHEDIR", str(tmp_path))
    put(cluster, holder(), pod(0, 1))
    known = resources(Cluster())
    monkeypatch.setattr(cluster, "served", CORE)
    with pytest.raises(ClusterUnavailable, match="resource type"):
        get_run(Cluster(), "gpt2", known)


def test_a_group_that_serves_another_resource_holds_no_run(cluster, call, monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECACHEDIR", str(tmp_path))
    served = {**CORE, "kubeflow.org/v2beta1": {"mpijobs": "MPIJob"}}
    monkeypatch.setattr(cluster, "served", served)
    put(cluster, holder(), pod(0, 1))
    assert resources(Cluster()) == ["jobs.batch"]
    assert call("k8s", "status", "gpt2").status == 0
    served["kubeflow.org/v1"] = {"pytorchjobs": "PyTorchJob"}
    assert resources(Cluster()) == ["jobs.batch", "pytorchjobs.kubeflow.org"]


def test_a_run_that_goes_on_after_the_timeout_is_69(cluster, seen):
    put(cluster, holder(), pod(0, 1))
    assert seen("k8s-wait-timeout", "wait", "gpt2", "--timeout", "0.01").status == 69


@pytest.mark.parametrize(
    ("fault", "options", "status", "said"),
    [
        ((403, "jobs is forbidden"), (), 77, "RES-CLUSTER-403"),
        ((500, "etcd is gone"), (), 69, "RES-CLUSTER-503"),
        (None, (), 66, "has no run `gpt2`"),
        (None, ("--context", "nowhere"), 69, "RES-CLUSTER-503"),
        (None, ("--context", "none"), 78, "none"),
        (None, ("--kubeconfig", "/nowhere"), 78, "/nowhere"),
        (None, ("--namespace", "other"), 66, "--namespace=other"),
        (None, ("--namespace", "a b"), 78, "--namespace 'a b'"),
    ],
)
def test_what_the_cluster_refuses_has_its_code(fault, options, status, said, cluster, call):
    if fault:
        cluster.faults.append(Fault(fault[0], "/jobs", 9, fault[1]))
    ended = call("k8s", "status", "gpt2", *options)
    assert (ended.status, ended.stdout) == (status, ""), ended.stderr
    assert said in ended.stderr
    assert "memcache.go" not in ended.stderr


def test_whoever_is_not_known_is_told(cluster, call, tmp_path):
    (tmp_path / "config").write_text(cluster.kubeconfig("lab", "another"), encoding="utf-8")
    ended = call("k8s", "status", "gpt2", "--kubeconfig", tmp_path / "config")
    assert (ended.status, "RES-CLUSTER-403" in ended.stderr) == (77, True), ended.stderr
    assert "another" not in ended.stderr


def test_without_kubectl_it_is_said_how_to_get_it(seen, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert seen("k8s-no-kubectl", "status", "gpt2").status == 78


def stamped(*lines):
    return [f"2026-11-23T10:00:0{nth}.{nth:09d}Z {text}" for nth, text in enumerate(lines)]


@pytest.mark.slow
def test_logs_say_whose_they_are(cluster, seen, call):
    put(cluster, holder(), *PREEMPTED_TWICE, pod(1, 1))
    cluster.logs |= {
        ("gpt2-0-003", False): stamped("the pod before"),
        ("gpt2-0-005", False): stamped("one", "from s3://me:pw@lab/run", "\x1b[31mred\x1b[0m"),
        ("gpt2-1-001", False): stamped("10%\r20%\rdone", "a\tb"),
    }
    seen("k8s-logs", "logs", "gpt2")
    seen("k8s-logs-json", "logs", "gpt2", "--json", "--index", "1")
    assert call("k8s", "logs", "gpt2", "-i", "0", "--tail", "1", "-q").stdout == "red\n"
    assert call("k8s", "logs", "gpt2", "-i", "0", "-p", "-q").stdout == "the pod before\n"
    refused = call("k8s", "logs", "gpt2", "--index", "7")
    assert (refused.status, "no pod of index 7" in refused.stderr) == (66, True)
    assert call("k8s", "logs", "gpt2", "-p", "-f").status == 2


@pytest.mark.slow
def test_logs_are_followed_through_a_cut_and_a_preemption(cluster, call, monkeypatch):
    monkeypatch.setattr("resilient_cli.kubernetes.watch._FOLLOW_POLL_SECONDS", 0.1)
    put(cluster, holder(), pod(0, 1))
    first, second = stamped("one", "two"), stamped("three")
    cluster.logs[("gpt2-0-001", False)] = first

    def go_on():
        opened = "GET /api/v1/namespaces/lab/pods/gpt2-0-001/log"
        while opened not in cluster.seen:
            time.sleep(0.01)
        time.sleep(0.1)
        cluster.cuts += 1
        time.sleep(0.1)
        first.append("2026-11-23T10:00:01.500000000Z after the cut")
        while cluster.seen.count(opened) < 2:
            time.sleep(0.01)
        cluster.logs[("gpt2-0-004", False)] = second
        put(cluster, pod(0, 1, code=75), pod(0, 4, code=0), holder("job", condition("Complete")))

    thread = threading.Thread(target=go_on)
    thread.start()
    ended = call("k8s", "logs", "gpt2", "--follow", "-q")
    thread.join()
    assert ended.status == 0, ended.stderr
    assert ended.stdout.splitlines() == ["one", "two", "after the cut", "three"]
