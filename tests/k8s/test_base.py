"""The base is accepted by every version, agrees with the exit codes, and keeps what it promises."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from resilient.errors import EXIT_CODES, PERMANENT
from resilient_cli.preemption_budget import MARGIN_SECONDS
from tests.helpers.manifest_rules import check_restricted, check_rules
from tests.helpers.manifest_schemas import VERSIONS, check_schema

K8S = Path(__file__).resolve().parents[2] / "k8s"
ROOT = K8S.parent
SHM = "/dev/shm"  # noqa: S108 - a mount of the container
REQUEUE = [one.number for one in EXIT_CODES if one.scheduler == "requeue, count nothing"]


@pytest.fixture
def base(built):
    return {one["kind"]: one for one in built["base"]}


@pytest.fixture
def spec(base):
    return base["Job"]["spec"]


@pytest.fixture
def pod(spec):
    return spec["template"]["spec"]


@pytest.fixture
def container(pod):
    (one,) = pod["containers"]
    return one


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_accepts_it(built, version):
    assert [said for one in built["base"] for said in check_schema(one, version)] == []


def test_an_api_server_would_take_it(built):
    assert [said for one in built["base"] for said in check_rules(one)] == []


def test_the_policy_is_that_of_the_exit_codes(spec):
    rules = spec["podFailurePolicy"]["rules"]
    codes = [(one["action"], one.get("onExitCodes", {}).get("values")) for one in rules]
    assert codes == [("Ignore", None), ("Ignore", REQUEUE), ("FailJob", list(PERMANENT))]
    assert rules[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert {one["onExitCodes"]["operator"] for one in rules[1:]} == {"In"}


def test_held_by_another_life_means_start_again_later():
    (held,) = (one for one in EXIT_CODES if one.number == 80)
    assert held.scheduler == "start again later"
    assert 80 not in PERMANENT


@pytest.mark.parametrize("page", ["README.md", "k8s/base/README.md"])
def test_pages_say_the_same(page):
    text = (ROOT / page).read_text()
    if page == "README.md":
        row = re.search(r"^\| 80 \|.*\| ([^|]*) \|$", text, re.MULTILINE)
        assert row[1] == "start again later"
    else:
        *first, last = PERMANENT
        assert f"{', '.join(map(str, first))} and {last} fail the Job at once" in text


def test_replacements_and_failures(spec, pod):
    assert spec["podReplacementPolicy"] == "Failed"
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    assert spec["successPolicy"]["rules"] == [{"succeededIndexes": "0"}]
    assert "backoffLimitPerIndex" not in spec
    assert pod["restartPolicy"] == "Never"
    assert {"activeDeadlineSeconds", "ttlSecondsAfterFinished", "backoffLimit"} <= spec.keys()


def test_the_pod_outlives_the_agents_grace(base, pod):
    grace = float(base["ConfigMap"]["data"]["GRACE_SECONDS"])
    assert pod["terminationGracePeriodSeconds"] > grace > MARGIN_SECONDS


def test_as_many_pods_as_the_run_expects(base, spec):
    assert base["ConfigMap"]["data"]["NNODES"] == str(spec["completions"])


def test_pod_security_restricted(pod, container):
    assert list(check_restricted(pod)) == []
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_all_that_is_written_has_a_volume(pod, container):
    paths = [one["mountPath"] for one in container["volumeMounts"]]
    values = {one["name"]: one.get("value", "") for one in container["env"]}
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR"):
        assert values[name].startswith(tuple(paths)), name
    volumes = {one["name"]: one for one in pod["volumes"]}
    (shm,) = (one["name"] for one in container["volumeMounts"] if one["mountPath"] == SHM)
    assert volumes[shm]["emptyDir"].keys() == {"medium", "sizeLimit"}
    assert volumes[shm]["emptyDir"]["medium"] == "Memory"


def test_nothing_kills_a_rank_that_waits(container):
    assert container.keys() & {"livenessProbe", "startupProbe"} == set()
    assert container["readinessProbe"]["httpGet"]["path"] == "/healthz"
    assert "--metrics-port=9464" in container["args"]


def test_requests_are_limits(container):
    assert container["resources"]["requests"] == container["resources"]["limits"]


def test_process_1_is_the_agent(container):
    assert container["command"] == ["resilient", "train"]


def test_the_pods_have_names_before_they_are_ready(base, pod):
    service = base["Service"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert pod["subdomain"] == service["metadata"]["name"]
    labels = base["Job"]["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    policy = base["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    assert policy.items() <= labels.items()


def test_nobody_outside_the_run_reaches_it(base):
    spec = base["NetworkPolicy"]["spec"]
    assert sorted(spec["policyTypes"]) == ["Egress", "Ingress"]
    assert spec["ingress"] == [{"from": [{"podSelector": spec["podSelector"]}]}]
    blocks = [to["ipBlock"] for one in spec["egress"] for to in one["to"] if "ipBlock" in to]
    assert blocks == [{"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16"]}]


def test_the_run_has_no_token(base, pod):
    assert base["ServiceAccount"]["automountServiceAccountToken"] is False
    assert pod["automountServiceAccountToken"] is False
    assert pod["serviceAccountName"] == base["ServiceAccount"]["metadata"]["name"]


def test_every_variable_in_the_arguments_is_given(base, container):
    given = {one["name"] for one in container["env"]} | base["ConfigMap"]["data"].keys()
    asked = {name for one in container["args"] for name in re.findall(r"\$\((\w+)\)", one)}
    assert asked
    assert asked <= given


def test_the_options_are_those_of_train(base, container):
    from resilient_cli.app import load
    from resilient_cli.command_tree import COMMANDS

    env = {**base["ConfigMap"]["data"], "RENDEZVOUS": "a-0.a:29400", "JOB_UID": "7"}
    words = [re.sub(r"\$\((\w+)\)", lambda one: env[one[1]], word) for word in container["args"]]
    context = load("train", COMMANDS["train"]).make_context("train", words)
    assert context.params["script"] == env["SCRIPT"]
    assert context.params["grace"] == float(env["GRACE_SECONDS"])


def test_kubectl_builds_the_same(texts, kubectl):
    command = [kubectl, "kustomize", str(K8S / "base")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == texts[K8S / "base"]
