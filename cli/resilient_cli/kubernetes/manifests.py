"""Manifests of a run as Kubernetes objects and as YAML.

All flavors share one pod template. ``k8s/base`` gives the reason for each part of the template. The
functions are pure, so that tests can compare their results. The YAML consists of block mappings and
lists. Strings that are not plain scalars are quoted as in JSON.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from resilient.errors import PERMANENT
from resilient_cli.kubernetes.spec import KUBERNETES_VARIABLES, Flavor, Spot, rule

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from resilient_cli.kubernetes.spec import KubeRun

PORT = 29400
METRICS_PORT = 9464
USER = 10001
PART_OF = "app.kubernetes.io/name"
_RUN = "app.kubernetes.io/instance"
# The id of this Job: pods of this Job never join the rendezvous of a later Job of its name.
_UID = "batch.kubernetes.io/controller-uid"
_NODES: Mapping[Spot, tuple[dict[str, str], list[dict[str, str]]]] = {
    Spot.NONE: ({}, []),
    Spot.AWS: (
        {"karpenter.sh/capacity-type": "spot"},
        [{"key": "spot", "operator": "Equal", "value": "true"}],
    ),
    Spot.GKE: (
        {"cloud.google.com/gke-spot": "true"},
        [{"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true"}],
    ),
    Spot.AKS: (
        {"kubernetes.azure.com/scalesetpriority": "spot"},
        [{"key": "kubernetes.azure.com/scalesetpriority", "operator": "Equal", "value": "spot"}],
    ),
}
# On GKE, SIGTERM is the first notice of a node's end.
_NOTICES = {Spot.NONE: "off", Spot.AWS: "aws", Spot.GKE: "off", Spot.AKS: "azure"}
_WRITABLE = {
    "HOME": "/scratch",
    "TMPDIR": "/tmp",  # noqa: S108 - a volume of the pod
    "XDG_CACHE_HOME": "/scratch/cache",
    "HF_HOME": "/scratch/cache/huggingface",
    "TORCHINDUCTOR_CACHE_DIR": "/scratch/cache/inductor",
    "TRITON_CACHE_DIR": "/scratch/cache/triton",
}


def labels(run: KubeRun) -> dict[str, str]:
    """Return the labels that all objects of a run share."""
    return {PART_OF: "resilient-train", _RUN: run.name}


def selector(name: str = "") -> str:
    """Return the label selector of a run, or of all runs if no name is given."""
    all_of_them = f"{PART_OF}=resilient-train"
    return f"{all_of_them},{_RUN}={name}" if name else all_of_them


def template(run: KubeRun, container: str, first: str, *, restarts: bool = False) -> dict[str, Any]:
    """Return the template of a run's pods.

    Args:
        run: Specification of the run.
        container: Name of the container, by which controllers find it.
        first: Host name of the pod that serves the rendezvous.
        restarts: Whether the controller sets the restart policy.
    """
    selector, tolerations = _NODES[run.spot]
    all_tolerations = [{**toleration, "effect": "NoSchedule"} for toleration in tolerations]
    if run.resources.gpus:
        all_tolerations.append(
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        )
    spec: dict[str, Any] = {
        "subdomain": run.name,
        "serviceAccountName": run.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": run.times.termination,
        "securityContext": {
            "runAsNonRoot": True,
            **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), USER),
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(run, container, first, restarts=restarts)],
        "volumes": _volumes(run),
    }
    if not restarts:
        spec["restartPolicy"] = "Never"
    if selector:
        spec["nodeSelector"] = selector
    if all_tolerations:
        spec["tolerations"] = all_tolerations
    return {"metadata": {"labels": {**labels(run), **run.identity.labels}}, "spec": spec}


def _container(run: KubeRun, name: str, first: str, *, restarts: bool) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": name,
        "image": run.image,
        "command": ["resilient", "train"],
        # Scripts may write to their working directory; the file system of the image is read-only.
        "workingDir": "/scratch",
        "args": [*_options(run, first), *(word.replace("$(", "$$(") for word in run.command)],
        "env": _environment(run, _RUN if restarts else _UID),
        "ports": [
            {"name": "rendezvous", "containerPort": PORT},
            {"name": "metrics", "containerPort": METRICS_PORT},
        ],
        "readinessProbe": {
            "httpGet": {"path": "/healthz", "port": "metrics"},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "resources": {"requests": _quantities(run), "limits": _quantities(run)},
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in _mounts(run)],
    }
    if run.secrets:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in run.secrets]
    return container


def _options(run: KubeRun, first: str) -> list[str]:
    nodes = f"{run.pods_min}:{run.pods_max}" if run.pods_min < run.pods_max else str(run.pods_max)
    options = [
        f"--nnodes={nodes}",
        f"--rdzv-endpoint={first}:{PORT}",
        "--rdzv-id=$(RUN_ID)",
        f"--metrics-port={METRICS_PORT}",
        # Listen on every interface: the probe connects from the node.
        "--metrics-host=0.0.0.0",
    ]
    if "rdzv_conf" not in run.given:
        # Nodes may be scarce: pods that have a node wait for the others instead of failing.
        options.append(f"--rdzv-conf=join_timeout={run.times.deadline}")
    if "grace" not in run.given:
        options.append(f"--grace={run.times.grace:g}")
    if "notice" not in run.given:
        options.append(f"--notice={_NOTICES[run.spot]}")
    if "nproc_per_node" not in run.given:
        options.append(f"--nproc-per-node={'gpu' if run.resources.gpus else '1'}")
    return options


def _environment(run: KubeRun, identity: str) -> list[dict[str, Any]]:
    paths = (
        "metadata.name",
        "metadata.namespace",
        "spec.nodeName",
        f"metadata.labels['{identity}']",
    )
    entries = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in zip(KUBERNETES_VARIABLES, paths, strict=True)
    ]
    variables = {**_WRITABLE, "PYTHONUNBUFFERED": "1", **dict(run.environment)}
    # Kubernetes would expand `$(` in a value.
    return [*entries, *({"name": k, "value": v.replace("$(", "$$(")} for k, v in variables.items())]


def _quantities(run: KubeRun) -> dict[str, str]:
    resources = run.resources
    limits = {"cpu": resources.cpu, "memory": resources.memory, "ephemeral-storage": resources.disk}
    return {**limits, "nvidia.com/gpu": str(resources.gpus)} if resources.gpus else limits


def _mounts(run: KubeRun) -> list[tuple[str, str]]:
    mounts = [("shm", "/dev/shm"), ("tmp", "/tmp"), ("scratch", "/scratch")]  # noqa: S108 - of the pod
    return [*mounts, ("checkpoints", "/checkpoints")] if run.claim else mounts


def _volumes(run: KubeRun) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": run.resources.shm}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "scratch", "emptyDir": {}},
    ]
    claim = {"name": "checkpoints", "persistentVolumeClaim": {"claimName": run.claim}}
    return [*volumes, claim] if run.claim else volumes


REQUEUE = 75
_DAY_SECONDS = 86400
_JOB_SETS = 3


def manifests(run: KubeRun, flavor: Flavor) -> list[dict[str, Any]]:
    """Return all objects of a run, in the order of their creation."""
    holders = {
        Flavor.JOB: _job,
        Flavor.KUEUE: _job,
        Flavor.JOBSET: _jobset,
        Flavor.TRAINJOB: _trainjob,
        Flavor.PYTORCHJOB: _pytorchjob,
    }
    account = _object(run, "v1", "ServiceAccount", {"automountServiceAccountToken": False})
    if run.identity.annotations:
        account["metadata"]["annotations"] = run.identity.annotations
    objects = [account, _network(run)]
    if flavor in (Flavor.JOB, Flavor.KUEUE):
        objects.append(_service(run))
    return objects + holders[flavor](run)


def _object(run: KubeRun, version: str, kind: str, more: dict[str, Any]) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": run.name}
    if run.namespace:
        metadata["namespace"] = run.namespace
    metadata["labels"] = labels(run)
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **more}


def _service(run: KubeRun) -> dict[str, Any]:
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": labels(run),
        "ports": [{"name": "rendezvous", "port": PORT}, {"name": "metrics", "port": METRICS_PORT}],
    }
    return _object(run, "v1", "Service", {"spec": spec})


def _network(run: KubeRun) -> dict[str, Any]:
    own_pods = {"podSelector": {"matchLabels": labels(run)}}
    names = [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]
    anywhere = {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16"]}}
    egress: list[dict[str, Any]] = [
        {"to": [own_pods]},
        {"to": [{"namespaceSelector": {}}], "ports": names},
        {"to": [anywhere], "ports": [{"port": 443, "protocol": "TCP"}]},
    ]
    if run.spot in (Spot.AWS, Spot.AKS):
        # The metadata service, which gives the preemption notice.
        egress.append(rule(["169.254.169.254/32"], [80]))
    egress += run.identity.egress
    egress += [rule([network], [port]) for network, port in run.egress]
    spec = {
        **own_pods,
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [own_pods]}],
        "egress": egress,
    }
    return _object(run, "networking.k8s.io/v1", "NetworkPolicy", {"spec": spec})


def _job(run: KubeRun) -> list[dict[str, Any]]:
    manifest = _object(run, "batch/v1", "Job", {"spec": _job_spec(run, "train", f"{run.name}-0")})
    manifest["spec"] |= {
        "activeDeadlineSeconds": run.times.deadline,
        "ttlSecondsAfterFinished": _DAY_SECONDS,
    }
    if run.queue:
        manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = run.queue
        manifest["spec"]["suspend"] = True
    return [manifest]


def _job_spec(run: KubeRun, container: str, first: str) -> dict[str, Any]:
    codes = {"containerName": container, "operator": "In"}
    conditions = [{"type": "DisruptionTarget", "status": "True"}]
    rules = [
        {"action": "Ignore", "onPodConditions": conditions},
        {"action": "Ignore", "onExitCodes": {**codes, "values": [REQUEUE]}},
        {"action": "FailJob", "onExitCodes": {**codes, "values": list(PERMANENT)}},
    ]
    return {
        "completionMode": "Indexed",
        "completions": run.pods_max,
        "parallelism": run.pods_max,
        # If one pod fails, the others may fail with it.
        "backoffLimit": run.failures_max * run.pods_max,
        "podReplacementPolicy": "Failed",
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "podFailurePolicy": {"rules": rules},
        "template": template(run, container, _full_host_name(run, first)),
    }


def _full_host_name(run: KubeRun, pod: str) -> str:
    """Return the full host name of a pod, which the pod itself finds in its own /etc/hosts."""
    return f"{pod}.{run.name}.$(POD_NAMESPACE).svc.cluster.local"


def _job_set_fields(run: KubeRun, container: str, part: str) -> dict[str, Any]:
    """Return the fields that a JobSet and a TrainingRuntime share."""
    permanent = {
        "name": "permanent",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"],
    }
    spec = _job_spec(run, container, f"{run.name}-{part}-0-0")
    spec["activeDeadlineSeconds"] = run.times.deadline
    return {
        "network": {"publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": _JOB_SETS, "rules": [permanent]},
        "replicatedJobs": [{"name": part, "template": {"spec": spec}}],
    }


def _jobset(run: KubeRun) -> list[dict[str, Any]]:
    spec = {"ttlSecondsAfterFinished": _DAY_SECONDS, **_job_set_fields(run, "train", "worker")}
    spec["network"] |= {"enableDNSHostnames": True, "subdomain": run.name}
    return [_object(run, "jobset.x-k8s.io/v1alpha2", "JobSet", {"spec": spec})]


def _trainjob(run: KubeRun) -> list[dict[str, Any]]:
    version = "trainer.kubeflow.org/v1alpha1"
    job_set_fields = _job_set_fields(run, "node", "node")
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    job_set_fields["replicatedJobs"][0]["template"]["metadata"] = {"labels": step}
    policy = {"mlPolicy": {"numNodes": run.pods_max}, "template": {"spec": job_set_fields}}
    runtime = _object(run, version, "TrainingRuntime", {"spec": policy})
    runtime["metadata"]["labels"]["trainer.kubeflow.org/framework"] = "torch"
    ref = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": run.name}
    spec = {"runtimeRef": ref, "trainer": {"numNodes": run.pods_max}}
    return [runtime, _object(run, version, "TrainJob", {"spec": spec})]


def _pytorchjob(run: KubeRun) -> list[dict[str, Any]]:
    pods = template(run, "pytorch", f"{run.name}-worker-0", restarts=True)
    # The operator gives each pod its own name and Service.
    del pods["spec"]["subdomain"]
    worker = {"replicas": run.pods_max, "restartPolicy": "OnFailure", "template": pods}
    policy = {
        # The limit counts preemptions too.
        "backoffLimit": 100,
        "activeDeadlineSeconds": run.times.deadline,
        "ttlSecondsAfterFinished": _DAY_SECONDS,
        "cleanPodPolicy": "Running",
    }
    spec = {"runPolicy": policy, "pytorchReplicaSpecs": {"Worker": worker}}
    return [_object(run, "kubeflow.org/v1", "PyTorchJob", {"spec": spec})]


_PLAIN_SCALAR = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_YAML_ESCAPED = re.compile(r"[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
# Words that YAML 1.1 does not read as a string.
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


def to_yaml(documents: list[dict[str, Any]]) -> str:
    """Return the documents as YAML, each after a line ``---``."""
    return "".join(f"---\n{''.join(_block(document, 0))}" for document in documents)


def _block(value: dict[str, Any] | list[Any], depth: int) -> Iterator[str]:
    pad = "  " * depth
    if isinstance(value, dict):
        for key, value_of_key in value.items():
            yield f"{pad}{_scalar(key)}:"
            yield from _after(value_of_key, depth)
        return
    for item in value:
        if isinstance(item, dict) and item:
            # The first key stands beside the dash.
            yield f"{pad}- {''.join(_block(item, depth + 1)).removeprefix(pad + '  ')}"
        else:
            yield f"{pad}- {_scalar(item)}\n"


def _after(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, dict | list) and value:
        yield "\n"
        yield from _block(value, depth + 1)
    else:
        yield f" {_scalar(value)}\n"


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN_SCALAR.fullmatch(value) and value.lower() not in _WORDS:
        return value
    text = json.dumps(value, ensure_ascii=False)
    # JSON leaves these characters unescaped, and YAML does not accept them.
    return _YAML_ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
