"""State of a run, derived from the objects of a cluster: pods by index, and exit code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resilient.errors import PERMANENT
from resilient_cli.kubernetes.manifests import REQUEUE
from resilient_cli.kubernetes.spec import Flavor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Object = dict[str, Any]

QUEUE = "kueue.x-k8s.io/queue-name"
_INDEXES = (
    "batch.kubernetes.io/job-completion-index",
    "training.kubeflow.org/replica-index",
)
_DONE = ("Complete", "Completed", "Succeeded")
_FLAVORS = {"Job": Flavor.JOB, "JobSet": Flavor.JOBSET, "TrainJob": Flavor.TRAINJOB}
_FLAVORS["PyTorchJob"] = Flavor.PYTORCHJOB
ENDED = ("complete", "failed", "suspended")
"""States that only a user, or a controller of the user, changes."""


@dataclass(frozen=True, slots=True)
class PodState:
    """State of a pod of a run.

    Attributes:
        name: Name of the pod.
        index: Index in the run; 0 if no label gives it.
        phase: ``Pending``, ``Running``, ..., or the reason why its container waits.
        node: Node of the pod; empty before it has one.
        restarts: Restarts of its container in this pod.
        exit_code: Exit code of its container's last end; None before the first end.
        ended_at: Time of that end.
        disrupted: Whether the cluster removed the pod.
        created_at: Creation time of the pod.
        container: Name of the container that trains.
    """

    name: str
    index: int
    phase: str
    node: str
    restarts: int
    exit_code: int | None
    ended_at: str
    disrupted: bool
    created_at: str
    container: str

    @property
    def was_preempted(self) -> bool:
        """True if a preemption ended the pod; preemptions do not count."""
        return self.disrupted or self.exit_code == REQUEUE

    @property
    def has_failed(self) -> bool:
        """True if a failure ended the pod; failures count."""
        return bool(self.exit_code) and not self.was_preempted


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """Warning of the cluster about an object of a run."""

    last_at: str
    about: str
    reason: str
    message: str
    count: int


@dataclass(frozen=True, slots=True)
class RunState:
    """State of a run in a cluster.

    Attributes:
        name: Name of the run.
        namespace: Namespace of the run.
        flavor: Kind of object that holds the pods.
        state: ``pending``, ``queued``, ``running``, ``suspended``, ``complete`` or ``failed``.
        reason: Reason, in the controller's word; empty for none.
        message: The same reason in a sentence.
        queue: Queue of Kueue; empty without Kueue.
        admission: State in Kueue: ``admitted``, ``pending`` or ``evicted``; empty without Kueue.
        repository: Repository of the checkpoints, if the command names it.
        claims: PersistentVolumeClaims that the pods mount.
        pods: Existing pods by index, the newest of an index last.
        events: Warnings, newest last.
    """

    name: str
    namespace: str
    flavor: Flavor
    state: str
    reason: str
    message: str
    queue: str
    admission: str
    repository: str
    claims: tuple[str, ...]
    pods: tuple[PodState, ...]
    events: tuple[ClusterEvent, ...] = ()

    @property
    def has_ended(self) -> bool:
        """True if the run has reached a state that it does not leave by itself."""
        return self.state in ENDED

    @property
    def exit_code(self) -> int | None:
        """Exit code of the run by our table; None while it runs.

        A failed run has the code of a pod after which another start would end the same way. If no
        pod has such a code, it is the code of the last failure that counted. A suspended run counts
        as preempted.
        """
        if self.state == "complete":
            return 0
        if self.state == "suspended":
            return REQUEUE
        if self.state != "failed":
            return None
        failed_pods = sorted(
            (pod for pod in self.pods if pod.exit_code), key=lambda pod: pod.ended_at
        )
        counted_pods = [pod for pod in failed_pods if pod.has_failed]
        fatal = [pod for pod in counted_pods if pod.exit_code in PERMANENT]
        # A run that exceeds --deadline did not fail: its last pods show whether they saved.
        candidates = (
            failed_pods
            if self.reason == "DeadlineExceeded"
            else fatal or counted_pods or failed_pods
        )
        return candidates[-1].exit_code if candidates else 1

    def newest(self) -> dict[int, PodState]:
        """Return the newest pod of each index."""
        return {pod.index: pod for pod in self.pods}


def state_of(
    holder: Object, pods: Sequence[Object], workload: Object | None, events: Sequence[Object]
) -> RunState:
    """Return the state of a run from its objects.

    Args:
        holder: Job, JobSet, TrainJob or PyTorchJob.
        pods: All pods of the run.
        workload: Workload of Kueue, if there is one.
        events: Warnings of the namespace.
    """
    metadata = holder["metadata"]
    queue = metadata.get("labels", {}).get(QUEUE, "")
    pods_by_index = sorted(map(pod_of, pods), key=lambda pod: (pod.index, pod.created_at, pod.name))
    admission = _admission(workload) if queue else ""
    state, cause = _judge(holder, pods_by_index, admission)
    flavor = _FLAVORS[holder["kind"]]
    return RunState(
        metadata["name"],
        metadata["namespace"],
        Flavor.KUEUE if queue and flavor is Flavor.JOB else flavor,
        state,
        cause.get("reason", ""),
        cause.get("message", ""),
        queue,
        admission,
        repository_of([holder, *pods]),
        tuple(sorted(set(claims_of(holder.get("spec"))))),
        tuple(pods_by_index),
        tuple(_warnings({metadata["name"], *(pod.name for pod in pods_by_index)}, events)),
    )


def pod_of(pod: Object) -> PodState:
    """Return the state of a pod."""
    metadata, status, spec = pod["metadata"], pod.get("status", {}), pod.get("spec", {})
    labels = {**metadata.get("labels", {}), **metadata.get("annotations", {})}
    index = next((labels[label] for label in _INDEXES if label in labels), "0")
    container = spec.get("containers", [{}])[0].get("name", "")
    container_status: Object = next(
        (
            status_of_container
            for status_of_container in status.get("containerStatuses", ())
            if status_of_container["name"] == container
        ),
        {},
    )
    container_state = container_status.get("state", {})
    end = (
        container_state.get("terminated")
        or container_status.get("lastState", {}).get("terminated")
        or {}
    )
    phase = container_state.get("waiting", {}).get("reason") or status.get("phase", "Pending")
    return PodState(
        metadata["name"],
        int(index),
        "Terminating" if metadata.get("deletionTimestamp") and not end else phase,
        spec.get("nodeName", ""),
        container_status.get("restartCount", 0),
        end.get("exitCode"),
        end.get("finishedAt") or "",
        _condition(pod, "DisruptionTarget") is not None,
        metadata.get("creationTimestamp", ""),
        container,
    )


def _judge(
    holder: Object, pods: Sequence[PodState], admission: str
) -> tuple[str, Mapping[str, Any]]:
    for kinds, state in ((_DONE, "complete"), (("Failed",), "failed")):
        for kind in kinds:
            if condition := _condition(holder, kind):
                return state, condition
    suspension = _condition(holder, "Suspended")
    spec = holder.get("spec", {})
    if suspension or spec.get("suspend") or spec.get("runPolicy", {}).get("suspend"):
        # A run that waits in a queue is suspended too, and Kueue starts it.
        return "queued" if admission else "suspended", suspension or {}
    if any(pod.phase == "Running" for pod in pods):
        return "running", {}
    return "pending", {}


def _condition(manifest: Object, kind: str) -> dict[str, Any] | None:
    for condition in manifest.get("status", {}).get("conditions") or ():
        if condition["type"] == kind and condition["status"] == "True":
            return dict(condition)
    return None


def _admission(workload: Object | None) -> str:
    if workload is not None and _condition(workload, "Admitted"):
        return "admitted"
    return "evicted" if workload is not None and _condition(workload, "Evicted") else "pending"


def repository_of(container: Any) -> str:
    """Return the repository that a command anywhere in an object names; empty for none."""
    arguments = (container.get("args") or []) if isinstance(container, dict) else []
    for number, word in enumerate(arguments):
        if word in ("--repo", "-r"):
            return str(arguments[number + 1])
        if word.startswith("--repo="):
            return str(word.partition("=")[2])
    below = (
        container.values()
        if isinstance(container, dict)
        else container
        if isinstance(container, list)
        else ()
    )
    return next(filter(None, map(repository_of, below)), "")


def claims_of(value: Any) -> list[str]:
    """Return the names of the PersistentVolumeClaims anywhere in an object."""
    if isinstance(value, list):
        return [name for item in value for name in claims_of(item)]
    if not isinstance(value, dict):
        return []
    claim_names = [value["claimName"]] if isinstance(value.get("claimName"), str) else []
    return claim_names + [name for item in value.values() for name in claims_of(item)]


def _warnings(names: set[str], events: Sequence[Object]) -> list[ClusterEvent]:
    warnings = [
        ClusterEvent(
            event.get("series", {}).get("lastObservedTime")
            or event.get("lastTimestamp")
            or event.get("eventTime")
            or "",
            f"{event['involvedObject']['kind'].lower()}/{event['involvedObject']['name']}",
            event.get("reason", ""),
            " ".join(event.get("message", "").split()),
            event.get("count") or event.get("series", {}).get("count") or 1,
        )
        for event in events
        if event.get("type") == "Warning" and event["involvedObject"].get("name") in names
    ]
    return sorted(warnings, key=lambda event: event.last_at)
