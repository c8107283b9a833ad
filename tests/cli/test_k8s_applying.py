"""``resilient k8s diff``, ``apply`` and ``delete``, by the real kubectl on a small API server."""

from __future__ import annotations

import json

import pytest

from tests.helpers.clusters import pod
from tests.services.apirequests import TOKEN
from tests.services.apiserver import CORE, Fault

IMAGE = "lab/train@sha256:6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b"
RUN = ("--image", IMAGE, "--name", "gpt2", "--namespace", "lab")
TRAIN = ("--", "train", "--repo", "s3://lab/run", "/app/train.py")
ASKED = (*RUN, *TRAIN)
OBJECTS = ["serviceaccount/gpt2", "networkpolicy/gpt2", "service/gpt2", "job/gpt2"]


@pytest.fixture
def seen(call, matches, tmp_path):
    """Call the program and hold what it says against a transcript."""

    def look(name, *arguments):
        ended = call("k8s", *arguments)
        assert TOKEN not in ended.stdout + ended.stderr
        matches(name, ended, tmp_path)
        return ended

    return look


def versions(cluster):
    return {key: one["metadata"]["resourceVersion"] for key, one in cluster.objects.items()}


def test_apply_makes_what_render_gives_and_says_what_is_next(cluster, seen, call):
    assert seen("k8s-diff-new", "diff", *ASKED).status == 0
    assert call("k8s", "apply", "--dry-run", *ASKED).stdout == call("k8s", "diff", *ASKED).stdout
    assert cluster.objects == {}
    assert seen("k8s-apply", "apply", *ASKED).status == 0
    rendered = json.loads(seen("k8s-render-json", "render", "--json", *ASKED).stdout)["manifests"]
    for made in rendered:
        (stored,) = (one for one in cluster.objects.values() if one["kind"] == made["kind"])
        assert {name: stored[name] for name in made if name != "metadata"} == {
            name: made[name] for name in made if name != "metadata"
        }
    before = versions(cluster)
    again = seen("k8s-apply-json", "apply", "--json", *ASKED)
    assert json.loads(again.stdout)["changes"][0]["fields"] == []
    assert versions(cluster) == before
    assert call("k8s", "diff", "--exit-code", "-q", *ASKED).status == 0


def test_diff_names_the_fields_and_changes_nothing(cluster, seen, call):
    # The template of a Job cannot change; that of a PyTorchJob can.
    run = (*RUN, "--flavor", "pytorchjob")
    assert call("k8s", "apply", *run, *TRAIN).status == 0
    live = cluster.objects["pytorchjobs", "lab", "gpt2"]
    pods = live["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    pods["containers"][0]["env"].append({"name": "HF_TOKEN", "value": "hunter2"})
    cluster.put(live)
    before = versions(cluster)
    asked = (*run, "--deadline", "12", "--spot", "aws", "--exit-code", *TRAIN)
    ended = seen("k8s-diff", "diff", *asked)
    assert (ended.status, "hunter2" in ended.stdout) == (1, False)
    document = json.loads(seen("k8s-diff-json", "diff", "--json", *asked).stdout)
    paths = [one["path"] for each in document["changes"] for one in each["fields"]]
    assert "spec.runPolicy.activeDeadlineSeconds" in paths
    assert "hunter2" not in json.dumps(document)
    assert versions(cluster) == before


def test_what_the_cluster_refuses_changes_nothing(cluster, call):
    assert call("k8s", "apply", *ASKED).status == 0
    before = versions(cluster)
    other = call("k8s", "apply", *RUN, "--env", "A=1", *TRAIN)
    assert (other.status, "field is immutable" in other.stderr) == (78, True), other.stderr
    assert "hint: resilient k8s delete gpt2 --namespace=lab\n" in other.stderr
    cluster.set_by("autoscaler", ("jobs", "lab", "gpt2"), {"spec": {"backoffLimit": 99}})
    conflict = call("k8s", "apply", *ASKED)
    assert (conflict.status, "RES-CLUSTER-409" in conflict.stderr) == (80, True), conflict.stderr
    assert {key: one for key, one in versions(cluster).items() if key[0] != "jobs"} == {
        key: one for key, one in before.items() if key[0] != "jobs"
    }
    cluster.faults.append(Fault(403, "/jobs", 9))
    assert call("k8s", "apply", *ASKED).status == 77


def test_what_the_cluster_does_not_know_is_told(cluster, call, monkeypatch):
    monkeypatch.setattr(cluster, "served", CORE)
    monkeypatch.setenv("KUBECACHEDIR", "/nowhere")
    ended = call("k8s", "apply", *RUN, "--flavor", "jobset", *TRAIN)
    assert (ended.status, "controller is not installed" in ended.stderr) == (78, True), ended.stderr
    assert cluster.objects == {}


def test_kueue_says_whether_what_is_there_is_suspended(cluster, call):
    asked = (*RUN, "--flavor", "kueue", "--queue", "training", *TRAIN)
    assert call("k8s", "apply", *asked).status == 0
    job = ("jobs", "lab", "gpt2")
    assert cluster.objects[job]["spec"]["suspend"] is True
    cluster.set_by("kueue", job, {"spec": {"suspend": False}})
    assert call("k8s", "apply", *asked).status == 0
    assert cluster.objects[job]["spec"]["suspend"] is False


@pytest.mark.slow
@pytest.mark.parametrize("flavor", ["jobset", "trainjob", "pytorchjob"])
def test_other_flavors_are_applied_and_deleted(flavor, cluster, call):
    assert call("k8s", "apply", *RUN, "--flavor", flavor, *TRAIN).status == 0
    kinds = {key[0] for key in cluster.objects}
    assert f"{flavor}s" in kinds
    assert call("k8s", "status", "gpt2", "-n", "lab", "-q").stdout == "pending\n"
    assert call("k8s", "delete", "gpt2", "-n", "lab", "--yes").status == 0
    assert cluster.objects == {}


@pytest.mark.slow
def test_delete_says_what_goes_and_what_stays(cluster, seen, call):
    assert call("k8s", "apply", *RUN, "--claim", "data", *TRAIN).status == 0
    cluster.put(pod(0, 1))
    refused = seen("k8s-delete-refused", "delete", "gpt2")
    assert (refused.status, len(cluster.objects)) == (2, 5)
    seen("k8s-delete-dry-run", "delete", "gpt2", "--dry-run")
    assert len(cluster.objects) == 5
    document = json.loads(seen("k8s-delete-json", "delete", "gpt2", "--yes", "--json").stdout)
    assert sorted(document["deleted"]) == sorted(OBJECTS)
    assert document["stays"] == ["s3://lab/run", "persistentvolumeclaim/data"]
    assert [key[0] for key in cluster.objects] == ["pods"], "its controller takes them away"
    assert call("k8s", "delete", "gpt2", "--yes").status == 66


@pytest.mark.slow
def test_delete_asks_whoever_is_there(cluster, call, monkeypatch):
    assert call("k8s", "apply", *ASKED).status == 0
    monkeypatch.setattr("resilient_cli.commands.k8s.is_interactive", lambda _: True)
    for answer, status, left in ((False, 1, 4), (True, 0, 0)):
        monkeypatch.setattr("typer.confirm", lambda *_, said=answer, **__: said)
        assert call("k8s", "delete", "gpt2").status == status
        assert len(cluster.objects) == left
