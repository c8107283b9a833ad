"""Every component and overlay is accepted by every version, and keeps what the base promises."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from resilient.errors import EXIT_CODES, PERMANENT
from resilient_cli.preemption_budget import NOTICE_SECONDS
from tests.helpers.manifest_rules import check_restricted, check_rules, pods
from tests.helpers.manifest_schemas import VERSIONS, check_schema

K8S = Path(__file__).resolve().parents[2] / "k8s"
NAMES = sorted(
    path.parent.relative_to(K8S).as_posix()
    for path in K8S.rglob("kustomization.yaml")
    if path.parent != K8S / "base"
)
OVERLAYS = [one for one in NAMES if one.startswith("overlays/")]
# The only one that asks for a version.
SINCE = {"components/gang": "1.37"}
REQUEUE = [one.number for one in EXIT_CODES if one.scheduler == "requeue, count nothing"]
NOTICES = {
    "components/spot-aws": NOTICE_SECONDS["aws"],
    "overlays/elastic-spot": NOTICE_SECONDS["aws"],
    "components/spot-gke": NOTICE_SECONDS["gke"],
    "components/spot-aks": NOTICE_SECONDS["azure"],
}
_LINES = re.MULTILINE
_SECRET = re.compile(r"AKIA|BEGIN [A-Z ]*PRIVATE|password:|secret_access|SECRET_ACCESS")


def policies(value):
    """Yield the rules of every podFailurePolicy."""
    if isinstance(value, dict):
        if "podFailurePolicy" in value:
            yield value["podFailurePolicy"]["rules"]
        for one in value.values():
            yield from policies(one)
    elif isinstance(value, list):
        for one in value:
            yield from policies(one)


def settings(documents):
    (found,) = (one["data"] for one in documents if one["kind"] == "ConfigMap")
    return found


def trainers(documents):
    return [pod["spec"] for one in documents for pod in pods(one)]


@pytest.mark.parametrize("name", NAMES)
def test_every_version_accepts_it(built, name):
    versions = VERSIONS if name in OVERLAYS else (SINCE.get(name, VERSIONS[0]), VERSIONS[-1])
    said = [
        f"{version}: {one['kind']}: {problem}"
        for version in versions
        for one in built[name]
        for problem in check_schema(one, version)
    ]
    assert said == []


@pytest.mark.parametrize("name", NAMES)
def test_an_api_server_would_take_it(built, name):
    assert [said for one in built[name] for said in check_rules(one)] == []


@pytest.mark.parametrize("name", NAMES)
def test_its_pods_are_restricted_and_wait_in_peace(built, name):
    specs = trainers(built[name])
    assert len(specs) == 1
    assert [said for one in specs for said in check_restricted(one)] == []
    (container,) = specs[0]["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    mounted = {one["mountPath"] for one in container["volumeMounts"]}
    assert container["workingDir"] in mounted
    assert container.keys() & {"livenessProbe", "startupProbe"} == set()
    assert container["resources"]["requests"] == container["resources"]["limits"]


@pytest.mark.parametrize("name", NAMES)
def test_its_policy_is_that_of_the_exit_codes(built, name):
    found = [rules for one in built[name] for rules in policies(one)]
    # The operator of PyTorchJob knows none.
    assert len(found) == (name != "overlays/pytorchjob-v1")
    ((container,),) = (one["containers"] for one in trainers(built[name]))
    wanted = [
        {
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        },
        *(
            {
                "action": action,
                "onExitCodes": {
                    "containerName": container["name"],
                    "operator": "In",
                    "values": codes,
                },
            }
            for action, codes in (("Ignore", REQUEUE), ("FailJob", list(PERMANENT)))
        ),
    ]
    assert found in ([], [wanted])


@pytest.mark.parametrize("name", NAMES)
def test_a_save_fits_before_the_node_is_gone(built, name):
    grace = float(settings(built[name])["GRACE_SECONDS"])
    (pod,) = trainers(built[name])
    assert grace < pod["terminationGracePeriodSeconds"] <= NOTICES.get(name, 3600)


@pytest.mark.parametrize("name", OVERLAYS)
def test_no_run_takes_longer_than_it_may(built, name):
    text = yaml.safe_dump_all(built[name])
    found = {int(one) for one in re.findall(r"activeDeadlineSeconds: (\d+)", text)}
    assert len(found) == 1
    # A JobSet would start a Job again that took too long.
    assert text.count("- PodFailurePolicy") == text.count("- DeadlineExceeded")


@pytest.mark.parametrize("name", OVERLAYS)
def test_as_many_pods_as_the_run_expects(built, name):
    most = int(settings(built[name])["NNODES"].rpartition(":")[2])
    text = yaml.safe_dump_all(one for one in built[name] if one["kind"] != "ConfigMap")
    counts = re.findall(
        r"^ *(?:completions|parallelism|numNodes|replicas): (\d+)$", text, re.MULTILINE
    )
    ours = [int(one) for one in counts]
    assert ours
    # The replicated Job of a JobSet is one Job.
    assert set(ours) <= ({most, 1} if name.endswith("jobset") else {most})


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("overlays/single-node", "resilient-train-0.resilient-train."),
        ("overlays/elastic-spot", "resilient-train-0.resilient-train."),
        ("overlays/dev", "resilient-train-0.resilient-train."),
        ("overlays/jobset", "resilient-train-worker-0-0.resilient-train."),
        ("overlays/trainjob", "resilient-train-node-0-0.resilient-train."),
        ("overlays/pytorchjob-v1", "resilient-train-worker-0:"),
    ],
)
def test_the_pods_meet_at_the_first(built, name, first):
    ((container,),) = (one["containers"] for one in trainers(built[name]))
    values = {one["name"]: one.get("value") for one in container["env"]}
    assert values["RENDEZVOUS"].startswith(first)


@pytest.mark.parametrize("name", ["jobset", "trainjob", "pytorchjob-v1"])
def test_the_job_only_lends_its_pods(built, name):
    kinds = {one["kind"] for one in built[f"overlays/{name}"]}
    assert not kinds & {"Job", "Service"}
    assert kinds & {"JobSet", "TrainJob", "PyTorchJob"}


@pytest.mark.parametrize("name", ["spot-aws", "spot-gke", "spot-aks", "gpu"])
def test_it_is_let_onto_its_nodes(built, name):
    (pod,) = trainers(built[f"components/{name}"])
    assert pod["tolerations"]
    assert ("nodeSelector" in pod) == name.startswith("spot")


def test_tolerations_of_two_components_add_up(built):
    (pod,) = trainers(built["overlays/elastic-spot"])
    assert {one["key"] for one in pod["tolerations"]} == {"nvidia.com/gpu", "spot"}


def test_shared_memory_is_within_the_limit(built):
    for name in NAMES:
        (pod,) = trainers(built[name])
        (shm,) = (one["emptyDir"] for one in pod["volumes"] if one["name"] == "shm")
        limit = pod["containers"][0]["resources"]["limits"]["memory"]
        assert shm["medium"] == "Memory"
        assert {"512Mi": 0.5, "4Gi": 4, "32Gi": 32}[shm["sizeLimit"]] < int(limit[:-2])


def test_the_queues_are_accepted():
    text = (K8S / "components" / "kueue" / "queues.yaml").read_text()
    found = list(yaml.load_all(text, yaml.CSafeLoader))
    assert len(found) == 3
    assert [said for one in found for said in (*check_schema(one), *check_rules(one))] == []


@pytest.mark.parametrize("name", [*NAMES, "base"])
def test_each_folder_has_a_page_and_nothing_secret(texts, name):
    page = (K8S / name / "README.md").read_text()
    assert page.startswith(f"# {Path(name).name}\n")
    assert len(page.splitlines()) <= 50
    assert not _SECRET.search(texts[K8S / name])


@pytest.mark.parametrize("name", OVERLAYS)
def test_kubectl_builds_the_same_overlay(texts, kubectl, name):
    command = [kubectl, "kustomize", str(K8S / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == texts[K8S / name]
