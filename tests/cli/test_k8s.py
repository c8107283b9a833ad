"""``resilient k8s render``: its manifests are those of the transcripts, and are accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from resilient.errors import EXIT_CODES, PERMANENT
from resilient_cli.kubernetes.manifests import REQUEUE, to_yaml
from tests.helpers.manifest_rules import check_restricted, check_rules, pods
from tests.helpers.manifest_schemas import VERSIONS, check_schema
from tests.helpers.told import RANK, SIZES, line

K8S = Path(__file__).resolve().parents[2] / "k8s"
IMAGE = (
    "--image",
    "lab/train@sha256:6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b",
)
TRAIN = ("--", "train", "--repo", "s3://lab/run", "/app/train.py")
FULL = (
    *(*IMAGE, "--name", "gpt2", "--namespace", "lab", "--pods", "2:4", "--gpus", "8"),
    *("--cpu", "32", "--memory", "256Gi", "--shm", "64Gi", "--disk", "50Gi", "--spot", "aws"),
    *("--env", "NCCL_DEBUG=INFO", "--env", "PRICE=$(cat x)", "--secret", "storage"),
    *("--claim", "data", "--max-failures", "3", "--deadline", "12"),
)
KINDS = {
    "job": ("Job",),
    "kueue": ("Job",),
    "jobset": ("JobSet",),
    "trainjob": ("TrainingRuntime", "TrainJob"),
    "pytorchjob": ("PyTorchJob",),
}
QUEUE = {"kueue": ("--queue", "training")}


def flavored(flavor):
    return ("--flavor", flavor, *QUEUE.get(flavor, ()))


@pytest.fixture
def render(call):
    """Return the manifests that these options give."""

    def made(*options):
        ended = call("k8s", "render", "--json", *options)
        assert ended.status == 0, ended.stderr
        return json.loads(ended.stdout)["manifests"]

    return made


@pytest.mark.parametrize("flavor", KINDS)
def test_manifests_are_those_of_the_transcripts(flavor, call, matches, tmp_path):
    options = FULL if flavor == "job" else IMAGE
    ended = call("k8s", "render", *flavored(flavor), *options, *TRAIN)
    matches(f"k8s-render-{flavor}", ended, tmp_path)


@pytest.mark.parametrize("flavor", KINDS)
def test_the_text_says_what_the_objects_do(flavor, render, call):
    made = render(*flavored(flavor), *FULL, *TRAIN)
    text = call("k8s", "render", *flavored(flavor), *FULL, *TRAIN).stdout
    assert list(yaml.load_all(text, yaml.CSafeLoader)) == made
    kinds = [one["kind"] for one in made]
    assert tuple(one for one in kinds if one in KINDS[flavor]) == KINDS[flavor]
    # Controllers of JobSets and Trainer make the Service themselves.
    assert ("Service" in kinds) == (flavor in ("job", "kueue"))


@pytest.mark.parametrize("flavor", KINDS)
@pytest.mark.parametrize("spot", ["none", "aws", "gke", "aks"])
def test_clusters_accept_it(flavor, spot, render):
    made = render(*flavored(flavor), *FULL, "--spot", spot, *TRAIN)
    said = [
        *(one for each in made for version in VERSIONS for one in check_schema(each, version)),
        *(one for each in made for one in check_rules(each)),
        *(one for each in made for pod in pods(each) for one in check_restricted(pod["spec"])),
    ]
    assert said == []


def policy(made):
    return made[-1]["spec"]["podFailurePolicy"]["rules"]


def test_the_policy_is_the_table_of_exit_codes(render):
    rules = policy(render(*IMAGE, *TRAIN))
    free = [one.number for one in EXIT_CODES if one.scheduler == "requeue, count nothing"]
    assert [REQUEUE] == free
    assert [one["action"] for one in rules] == ["Ignore", "Ignore", "FailJob"]
    assert [one["onExitCodes"]["values"] for one in rules[1:]] == [free, list(PERMANENT)]


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        ((), 2, "k8s needs a training to run"),
        ((*IMAGE, "--", "report", "runs/x"), 2, "k8s needs a training to run"),
        (TRAIN, 78, "--image '' is not an image"),
        (("--image", "a b", *TRAIN), 78, "--image 'a b' is not an image"),
        (("--image", "A/B", *TRAIN), 78, "--image 'A/B' is not an image"),
        (("--image", "a:b@sha256:12", *TRAIN), 78, "is not an image"),
        (("--image", "me:pw@reg.io/x:y", *TRAIN), 78, "--image 'reg.io/x:y' is not an image"),
        ((*IMAGE, "--", "train", "t.py"), 78, "is a relative path, and pods start in /scratch"),
        ((*IMAGE, "--", "train", "--repo", "az://c/r?sv=1&sig=pw", "/t.py"), 78, "or a signature"),
        ((*IMAGE, "--env", 'A={"password": "pw"}', *TRAIN), 78, "everyone who can read the Job"),
        ((*IMAGE, *TRAIN, "--wandb_key", "pw"), 78, "--wandb_key: everyone who can read"),
        ((*IMAGE, "--name", "My_Run", *TRAIN), 78, "--name 'My_Run' is not 1 to 40"),
        ((*IMAGE, "--name", "a" * 41, *TRAIN), 78, "is not 1 to 40"),
        ((*IMAGE, "--namespace", "a b", *TRAIN), 78, "--namespace 'a b'"),
        ((*IMAGE, "--secret", "A!", *TRAIN), 78, "--secret 'A!'"),
        ((*IMAGE, "--claim", "x\ny", *TRAIN), 78, "--claim"),
        ((*IMAGE, "--pods", "4:2", *TRAIN), 78, "at most 2 is less than at least 4"),
        ((*IMAGE, "--pods", "0", *TRAIN), 78, "--pods '0' is not N or MIN:MAX"),
        ((*IMAGE, "--memory", "64GB", *TRAIN), 78, "--memory '64GB' is not a size"),
        ((*IMAGE, "--cpu", "many", *TRAIN), 78, "--cpu 'many' is not 8, 0.5 or 500m"),
        ((*IMAGE, "--shm", "16Gi", *TRAIN), 78, "--shm 16Gi is part of --memory 16Gi"),
        ((*IMAGE, "--identity", "eks=x", *TRAIN), 78, "--identity 'eks=x' is not eks, irsa="),
        ((*IMAGE, "--identity", "gke", *TRAIN), 78, "--identity 'gke' is not eks, irsa="),
        ((*IMAGE, "--identity", "me=x", *TRAIN), 78, "--identity 'me=x' is not eks, irsa="),
        ((*IMAGE, "--identity", "irsa=a b", *TRAIN), 78, "a name has no blanks"),
        ((*IMAGE, "--egress", "10.0.0.0/8", *TRAIN), 78, "is not CIDR:PORT"),
        ((*IMAGE, "--egress", "10.0.0.1/8:9000", *TRAIN), 78, "has host bits set"),
        ((*IMAGE, "--egress", "10.0.0.0/8:70000", *TRAIN), 78, "is not CIDR:PORT"),
        ((*IMAGE, "--env", "A-B=1", *TRAIN), 78, "--env 'A-B' is not NAME=VALUE"),
        ((*IMAGE, "--env", "A", *TRAIN), 78, "--env 'A' is not NAME=VALUE"),
        ((*IMAGE, "--env", "A=1", "--env", "A=2", *TRAIN), 78, "--env A is given twice"),
        ((*IMAGE, "--env", "POD_NAME=x", *TRAIN), 78, "is set by Kubernetes"),
        ((*IMAGE, "--env", "HF_TOKEN=pw", *TRAIN), 78, "everyone who can read the Job"),
        ((*IMAGE, "--env", "PROXY=http://me:pw@x", *TRAIN), 78, "everyone who can read the Job"),
        ((*IMAGE, "--queue", "q", *TRAIN), 78, "--queue and --flavor kueue go together"),
        ((*IMAGE, "--flavor", "kueue", *TRAIN), 78, "--queue and --flavor kueue go together"),
        (
            (*IMAGE, "--", "train", "--repo", "s3://me:pw@h/b", "t.py"),
            78,
            "a password or a signature",
        ),
        ((*IMAGE, "--", "train", "--storage-options", "{}", "t.py"), 78, "use --secret"),
        ((*IMAGE, *TRAIN, "--hub_token=pw"), 78, "--hub_token: everyone who can"),
        ((*IMAGE, *TRAIN, "--password", "pw"), 78, "--password: everyone who can"),
        ((*IMAGE, "--", "train", "--nnodes", "2", "t.py"), 78, "train --nnodes: the manifests set"),
        ((*IMAGE, "--", "train", "--metrics-port", "1", "t.py"), 78, "the probe of the pods"),
        ((*IMAGE, "--spot", "gke", "--", "train", "--grace", "20", "/t.py"), 78, "notice 15 s"),
    ],
)
def test_what_cannot_be_is_refused_and_located(options, status, said, call):
    ended = call("k8s", "render", *options)
    assert (ended.status, ended.stdout) == (status, ""), ended.stderr
    assert said in ended.stderr
    assert "pw" not in ended.stderr


def times(made):
    (pod,) = (one["spec"] for each in made for one in pods(each))
    grace = next(one for one in pod["containers"][0]["args"] if one.startswith("--grace="))
    return float(grace.partition("=")[2]), pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize(
    ("spot", "expected"), [("none", (25, 30)), ("aws", (25, 30)), ("gke", (10, 15))]
)
def test_the_grace_fits_the_notice(spot, expected, render):
    assert times(render(*IMAGE, "--spot", spot, *TRAIN)) == expected


def test_the_grace_follows_what_saves_took(tmp_path, render, call):
    told = {"checkpoint": "checkpoint-9-g2", "stall_seconds": 1.0, "commit_seconds": 61.0}
    saves = [line(20 + nth, "CheckpointCommitted", **told, **SIZES, **RANK) for nth in range(3)]
    (tmp_path / "agent.jsonl").write_text("\n".join(saves) + "\n", encoding="utf-8")
    events = (*IMAGE, "--events", tmp_path)
    assert times(render(*events, "--spot", "aws", *TRAIN)) == (66, 71)
    refused = call("k8s", "render", *events, "--spot", "aks", *TRAIN)
    assert refused.status == 78
    assert "the termination grace 71 s, notice 30 s" in refused.stderr


def test_what_the_command_says_itself_is_said_once(render):
    own = ("--grace", "12", "--nproc-per-node", "4", "--notice", "file:/n")
    own += ("--rdzv-conf", "join_timeout=60")
    (job,) = (one for one in render(*IMAGE, "--", "train", *own, "/t.py") if one["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert [
        one for one in container["args"] if one.startswith(("--grace=", "--n", "--rdzv-c"))
    ] == [
        "--nnodes=1",
        "--nproc-per-node",
        "--notice",
        "--rdzv-conf",
    ]
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 17


def test_what_kubernetes_would_look_up_is_told_apart(render):
    (container,) = (
        one["spec"]["containers"][0]
        for each in render(*FULL, *TRAIN, "--tag=$(HOME)")
        for one in pods(each)
    )
    assert container["args"][-1] == "--tag=$$(HOME)"
    assert {"name": "PRICE", "value": "$$(cat x)"} in container["env"]


@pytest.mark.parametrize("spot", ["aws", "gke", "aks"])
def test_spot_nodes_are_tolerated_as_by_the_component(spot, render):
    made = render(*IMAGE, "--spot", spot, *TRAIN)
    (pod,) = (one["spec"] for each in made for one in pods(each))
    component = (K8S / f"components/spot-{spot}/kustomization.yaml").read_text(encoding="utf-8")
    patches = [yaml.safe_load(one["patch"]) for one in yaml.safe_load(component)["patches"]]
    values = {one["path"]: one.get("value") for each in patches for one in each}
    assert pod["tolerations"] == [values["/spec/template/spec/tolerations/-"]]
    assert pod["nodeSelector"] == values["/spec/template/spec/nodeSelector"]


def egress(made):
    (policy,) = (one for one in made if one["kind"] == "NetworkPolicy")
    return policy["spec"]["egress"]


@pytest.mark.parametrize(
    ("identity", "component"),
    [("eks", "s3-pod-identity"), ("gke=a@b.iam", "gcs-workload-identity")],
)
def test_an_identity_reaches_what_hands_it_out_as_by_the_component(identity, component, render):
    made = render(*IMAGE, "--identity", identity, *TRAIN)
    text = (K8S / f"components/{component}/kustomization.yaml").read_text(encoding="utf-8")
    patches = [yaml.safe_load(one["patch"]) for one in yaml.safe_load(text)["patches"]]
    values = {one["path"]: one.get("value") for each in patches for one in each}
    assert [one for one in egress(made) if one == values["/spec/egress/-"]]
    assert values["/spec/egress/-"] not in egress(render(*IMAGE, *TRAIN))


@pytest.mark.parametrize("flavor", KINDS)
@pytest.mark.parametrize(
    ("identity", "annotation", "label"),
    [
        ("irsa=arn:aws:iam::1:role/r", "eks.amazonaws.com/role-arn", None),
        ("gke=run@lab.iam.gserviceaccount.com", "iam.gke.io/gcp-service-account", None),
        ("azure=0-1", "azure.workload.identity/client-id", "azure.workload.identity/use"),
    ],
)
def test_an_identity_is_told_where_the_cloud_looks(flavor, identity, annotation, label, render):
    made = render(*flavored(flavor), *FULL, "--identity", identity, *TRAIN)
    (account,) = (one for one in made if one["kind"] == "ServiceAccount")
    assert account["metadata"]["annotations"] == {annotation: identity.partition("=")[2]}
    (labels,) = (one["metadata"]["labels"] for each in made for one in pods(each))
    assert label is None or labels[label] == "true"
    assert [one for each in made for one in check_schema(each, VERSIONS[-1])] == []
    assert [one for each in made for one in check_rules(each)] == []


def test_a_store_of_ones_own_can_be_reached(render):
    options = ("--egress", "10.0.0.0/8:9000", "--egress", "fd00::/8:443")
    made = render(*IMAGE, *options, *TRAIN)
    assert [
        (rule["to"][0]["ipBlock"]["cidr"], rule["ports"][0]["port"]) for rule in egress(made)[-2:]
    ] == [("10.0.0.0/8", 9000), ("fd00::/8", 443)]
    assert [one for each in made for one in check_schema(each, VERSIONS[-1])] == []


@pytest.mark.parametrize("flavor", KINDS)
def test_no_run_takes_longer_than_it_may(flavor, render):
    made = render(*flavored(flavor), *IMAGE, "--deadline", "1", *TRAIN)
    assert '"activeDeadlineSeconds": 3600' in json.dumps(made)


@pytest.mark.parametrize(
    "text",
    [
        "yes",
        "Off",
        "null",
        "1",
        "1e3",
        "0x1",
        "a: b",
        "- a",
        "",
        "#",
        "\U0001f600",
        "\x7f\x85",
        "\u2028\ufeff",
        "a\nb",
        "~",
        "a'\"",
        "*",
    ],
)
def test_texts_stay_texts(text):
    document = {"metadata": {"a": text, text: [text, {"b": text}]}, "c": {}, "d": [], "e": [[]]}
    assert yaml.load(to_yaml([document]), yaml.CSafeLoader) == document
