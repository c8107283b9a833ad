"""A run to the objects that Kubernetes is asked to make; pure, so that tests hold it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient.exit_codes import PERMANENT
from resilient_cli.kubernetes.pod import METRICS_PORT, PORT, labels, template
from resilient_cli.kubernetes.reach import rule
from resilient_cli.kubernetes.run import Flavor, Spot

if TYPE_CHECKING:
    from resilient_cli.kubernetes.run import KubeRun

REQUEUE = 75
_DAY_SECONDS = 86400
_JOB_SETS = 3


def manifests(run: KubeRun, flavor: Flavor) -> list[dict[str, Any]]:
    """Return all objects of a run, in the order in which they are to be made."""
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
    found = [account, _network(run)]
    if flavor in (Flavor.JOB, Flavor.KUEUE):
        found.append(_service(run))
    return found + holders[flavor](run)


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
    ours = {"podSelector": {"matchLabels": labels(run)}}
    names = [{"port": 53, "protocol": one} for one in ("UDP", "TCP")]
    anywhere = {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16"]}}
    egress: list[dict[str, Any]] = [
        {"to": [ours]},
        {"to": [{"namespaceSelector": {}}], "ports": names},
        {"to": [anywhere], "ports": [{"port": 443, "protocol": "TCP"}]},
    ]
    if run.spot in (Spot.AWS, Spot.AKS):
        # Where the notice comes from.
        egress.append(rule(["169.254.169.254/32"], [80]))
    egress += run.identity.egress
    egress += [rule([network], [port]) for network, port in run.egress]
    spec = {
        **ours,
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [ours]}],
        "egress": egress,
    }
    return _object(run, "networking.k8s.io/v1", "NetworkPolicy", {"spec": spec})


def _job(run: KubeRun) -> list[dict[str, Any]]:
    made = _object(run, "batch/v1", "Job", {"spec": _job_spec(run, "train", f"{run.name}-0")})
    made["spec"] |= {
        "activeDeadlineSeconds": run.times.deadline,
        "ttlSecondsAfterFinished": _DAY_SECONDS,
    }
    if run.queue:
        made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = run.queue
        made["spec"]["suspend"] = True
    return [made]


def _job_spec(run: KubeRun, container: str, first: str) -> dict[str, Any]:
    codes = {"containerName": container, "operator": "In"}
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    rules = [
        {"action": "Ignore", "onPodConditions": disrupted},
        {"action": "Ignore", "onExitCodes": {**codes, "values": [REQUEUE]}},
        {"action": "FailJob", "onExitCodes": {**codes, "values": list(PERMANENT)}},
    ]
    return {
        "completionMode": "Indexed",
        "completions": run.pods_max,
        "parallelism": run.pods_max,
        # When one pod fails the others may follow it.
        "backoffLimit": run.failures_max * run.pods_max,
        "podReplacementPolicy": "Failed",
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "podFailurePolicy": {"rules": rules},
        "template": template(run, container, _full(run, first)),
    }


def _full(run: KubeRun, pod: str) -> str:
    """Return the whole name of a pod, which it finds in its own /etc/hosts."""
    return f"{pod}.{run.name}.$(POD_NAMESPACE).svc.cluster.local"


def _sets(run: KubeRun, container: str, part: str) -> dict[str, Any]:
    """Return what a JobSet and a runtime of Trainer have in common."""
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
    spec = {"ttlSecondsAfterFinished": _DAY_SECONDS, **_sets(run, "train", "worker")}
    spec["network"] |= {"enableDNSHostnames": True, "subdomain": run.name}
    return [_object(run, "jobset.x-k8s.io/v1alpha2", "JobSet", {"spec": spec})]


def _trainjob(run: KubeRun) -> list[dict[str, Any]]:
    version = "trainer.kubeflow.org/v1alpha1"
    sets = _sets(run, "node", "node")
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    sets["replicatedJobs"][0]["template"]["metadata"] = {"labels": step}
    policy = {"mlPolicy": {"numNodes": run.pods_max}, "template": {"spec": sets}}
    runtime = _object(run, version, "TrainingRuntime", {"spec": policy})
    runtime["metadata"]["labels"]["trainer.kubeflow.org/framework"] = "torch"
    ref = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": run.name}
    spec = {"runtimeRef": ref, "trainer": {"numNodes": run.pods_max}}
    return [runtime, _object(run, version, "TrainJob", {"spec": spec})]


def _pytorchjob(run: KubeRun) -> list[dict[str, Any]]:
    pods = template(run, "pytorch", f"{run.name}-worker-0", restarts=True)
    # The operator gives every pod a name and a Service of its own.
    del pods["spec"]["subdomain"]
    worker = {"replicas": run.pods_max, "restartPolicy": "OnFailure", "template": pods}
    policy = {
        # It counts preemptions too.
        "backoffLimit": 100,
        "activeDeadlineSeconds": run.times.deadline,
        "ttlSecondsAfterFinished": _DAY_SECONDS,
        "cleanPodPolicy": "Running",
    }
    spec = {"runPolicy": policy, "pytorchReplicaSpecs": {"Worker": worker}}
    return [_object(run, "kubeflow.org/v1", "PyTorchJob", {"spec": spec})]
