"""Runs in the API server of the tests: what controllers would have made of what was applied."""

from __future__ import annotations

NAMESPACE = "lab"
LABELS = {"app.kubernetes.io/name": "resilient-train", "app.kubernetes.io/instance": "gpt2"}
HOLDERS = {
    "job": ("batch/v1", "Job"),
    "kueue": ("batch/v1", "Job"),
    "jobset": ("jobset.x-k8s.io/v1alpha2", "JobSet"),
    "trainjob": ("trainer.kubeflow.org/v1alpha1", "TrainJob"),
    "pytorchjob": ("kubeflow.org/v1", "PyTorchJob"),
}
ARGUMENTS = ["--nnodes=2", "--repo", "s3://me:pw@lab/run", "/app/train.py"]


def at(minute):
    """Return a time of the run."""
    return f"2026-11-23T10:{minute:02d}:00Z"


def condition(kind, reason="", message=""):
    """Return a condition that holds."""
    return {"type": kind, "status": "True", "reason": reason, "message": message}


def metadata(name, **more):
    return {"name": name, "namespace": NAMESPACE, "labels": dict(LABELS), **more}


def holder(flavor="job", *conditions, **spec):
    """Return what holds the pods, in a state."""
    version, kind = HOLDERS[flavor]
    manifest = {"apiVersion": version, "kind": kind, "metadata": metadata("gpt2"), "spec": spec}
    if flavor == "kueue":
        manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "training"
    return {**manifest, "status": {"conditions": list(conditions)}}


def pod(index, minute, *, code=None, phase="", node="n1", is_disrupted=False, flavor=""):  # noqa: PLR0913 - what pods differ in
    """Return a pod of an index that was made in a minute, and ended a minute later with a code."""
    termination = {"exitCode": code, "finishedAt": at(minute + 1)}
    state = {"running": {}} if code is None else {"terminated": termination}
    container = {"name": "train", "restartCount": 0, "state": state}
    conditions = [condition("DisruptionTarget", "EvictionByEvictionAPI")] if is_disrupted else []
    pod_metadata = metadata(f"gpt2-{index}-{minute:03d}", creationTimestamp=at(minute))
    label = "training.kubeflow.org/replica-index"
    if flavor != "pytorchjob":
        label = "batch.kubernetes.io/job-completion-index"
    pod_metadata["labels"][label] = str(index)
    usual = "Running" if code is None else "Failed" if code else "Succeeded"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": pod_metadata,
        "spec": {"nodeName": node, "containers": [{"name": "train", "args": ARGUMENTS}]},
        "status": {
            "phase": phase or usual,
            "conditions": conditions,
            "containerStatuses": [container] if phase != "Pending" else [],
        },
    }


def warning(name, reason, message, about="Pod", count=1):
    """Return an event about an object."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "type": "Warning",
        "metadata": {"name": f"{name}.{reason.lower()}", "namespace": NAMESPACE},
        "involvedObject": {"kind": about, "name": name},
        "lastTimestamp": at(30),
        "reason": reason,
        "message": message,
        "count": count,
    }


def workload(job, *conditions):
    """Return Kueue's Workload of a Job."""
    workload_metadata = {"name": "job-gpt2-1a2b3", "namespace": NAMESPACE}
    workload_metadata["labels"] = {"kueue.x-k8s.io/job-uid": job["metadata"]["uid"]}
    status = {"conditions": list(conditions)}
    version = "kueue.x-k8s.io/v1beta2"
    return {
        "apiVersion": version,
        "kind": "Workload",
        "metadata": workload_metadata,
        "spec": {},
        "status": status,
    }
