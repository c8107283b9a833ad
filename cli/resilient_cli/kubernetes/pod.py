"""The pod of a run: one template, whatever holds it. ``k8s/base`` says why each part is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient_cli.kubernetes.run import TOLD, Spot

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient_cli.kubernetes.run import KubeRun

PORT = 29400
METRICS_PORT = 9464
USER = 10001
PART_OF = "app.kubernetes.io/name"
_RUN = "app.kubernetes.io/instance"
# Another Job of the same name never meets what is left of this one.
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
# On GKE the end of a node is no earlier told than by SIGTERM.
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
    """Return what all objects of a run have in common."""
    return {PART_OF: "resilient-train", _RUN: run.name}


def selector(name: str = "") -> str:
    """Return the selector of what a run is made of; of all runs without a name."""
    all_of_them = f"{PART_OF}=resilient-train"
    return f"{all_of_them},{_RUN}={name}" if name else all_of_them


def template(run: KubeRun, container: str, first: str, *, restarts: bool = False) -> dict[str, Any]:
    """Return the template of a run's pods.

    Args:
        run: what was asked for.
        container: its name; controllers know it by one.
        first: name of the pod that serves the rendezvous.
        restarts: whether the controller says what is restarted.
    """
    selector, tolerations = _NODES[run.spot]
    wanted = [{**one, "effect": "NoSchedule"} for one in tolerations]
    if run.resources.gpus:
        wanted.append({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"})
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
    if wanted:
        spec["tolerations"] = wanted
    return {"metadata": {"labels": {**labels(run), **run.identity.labels}}, "spec": spec}


def _container(run: KubeRun, name: str, first: str, *, restarts: bool) -> dict[str, Any]:
    made: dict[str, Any] = {
        "name": name,
        "image": run.image,
        "command": ["resilient", "train"],
        # What a script writes beside itself has a place; that of the image cannot be written.
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
        made["envFrom"] = [{"secretRef": {"name": one}} for one in run.secrets]
    return made


def _options(run: KubeRun, first: str) -> list[str]:
    nodes = f"{run.pods_min}:{run.pods_max}" if run.pods_min < run.pods_max else str(run.pods_max)
    own = [
        f"--nnodes={nodes}",
        f"--rdzv-endpoint={first}:{PORT}",
        "--rdzv-id=$(RUN_ID)",
        f"--metrics-port={METRICS_PORT}",
        # Every interface: the probe asks from the node.
        "--metrics-host=0.0.0.0",
    ]
    if "rdzv_conf" not in run.given:
        # Nodes may be hard to get: who has one waits for the others, and fails no pod by that.
        own.append(f"--rdzv-conf=join_timeout={run.times.deadline}")
    if "grace" not in run.given:
        own.append(f"--grace={run.times.grace:g}")
    if "notice" not in run.given:
        own.append(f"--notice={_NOTICES[run.spot]}")
    if "nproc_per_node" not in run.given:
        own.append(f"--nproc-per-node={'gpu' if run.resources.gpus else '1'}")
    return own


def _environment(run: KubeRun, identity: str) -> list[dict[str, Any]]:
    paths = (
        "metadata.name",
        "metadata.namespace",
        "spec.nodeName",
        f"metadata.labels['{identity}']",
    )
    told = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in zip(TOLD, paths, strict=True)
    ]
    fixed = {**_WRITABLE, "PYTHONUNBUFFERED": "1", **dict(run.environment)}
    # `$(` in a value would be looked up.
    return [*told, *({"name": k, "value": v.replace("$(", "$$(")} for k, v in fixed.items())]


def _quantities(run: KubeRun) -> dict[str, str]:
    asked = run.resources
    own = {"cpu": asked.cpu, "memory": asked.memory, "ephemeral-storage": asked.disk}
    return {**own, "nvidia.com/gpu": str(asked.gpus)} if asked.gpus else own


def _mounts(run: KubeRun) -> list[tuple[str, str]]:
    own = [("shm", "/dev/shm"), ("tmp", "/tmp"), ("scratch", "/scratch")]  # noqa: S108 - of the pod
    return [*own, ("checkpoints", "/checkpoints")] if run.claim else own


def _volumes(run: KubeRun) -> list[dict[str, Any]]:
    own: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": run.resources.shm}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "scratch", "emptyDir": {}},
    ]
    claim = {"name": "checkpoints", "persistentVolumeClaim": {"claimName": run.claim}}
    return [*own, claim] if run.claim else own
