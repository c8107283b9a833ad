"""To look at a run in a cluster, and to wait for its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient.errors import ClusterUnavailable, ConfigError, DeadlineExceeded, NotRunning
from resilient_cli.kubernetes.kubectl import ask, items
from resilient_cli.kubernetes.pod import selector
from resilient_cli.kubernetes.run import Flavor
from resilient_cli.kubernetes.states import QUEUE, state_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from resilient.clock import Clock
    from resilient_cli.kubernetes.kubectl import Cluster
    from resilient_cli.kubernetes.states import RunState

HOLDERS = {
    Flavor.JOB: ("batch", "jobs"),
    Flavor.JOBSET: ("jobset.x-k8s.io", "jobsets"),
    Flavor.TRAINJOB: ("trainer.kubeflow.org", "trainjobs"),
    Flavor.PYTORCHJOB: ("kubeflow.org", "pytorchjobs"),
}
"""Group and name of the resource that holds a run's pods; Kueue's is a Job."""
_POLL_SECONDS = 5.0
_SILENCE_SECONDS = 600.0


def resources(cluster: Cluster) -> list[str]:
    """Return the resources that may hold a run and that the cluster knows."""
    groups = {one["name"]: one for one in ask(cluster, "get", "--raw", "/apis")["groups"]}
    return [
        f"{name}.{group}"
        for group, name in HOLDERS.values()
        if group in groups and name in _served(cluster, groups[group])
    ]


def find(cluster: Cluster, name: str, kinds: list[str]) -> list[dict[str, Any]]:
    """Return a run's objects of these kinds."""
    asked = ("get", ",".join(kinds), "-l", selector(name), "-o", "json")
    return items(ask(cluster, *asked))


def look(
    cluster: Cluster, name: str, kinds: list[str] | None = None, *, has_events: bool = False
) -> RunState:
    """Return what a cluster says of a run.

    Args:
        cluster: where.
        name: of the run.
        kinds: what may hold it, if that was asked before.
        has_events: whether warnings are asked for too.

    Raises:
        NotRunning: it knows none of that name.
        ConfigError: it knows two, of different flavors.
        ClusterUnavailable: it does not answer.
    """
    found = find(cluster, name, [*(kinds or resources(cluster)), "pods"])
    pods = [one for one in found if one["kind"] == "Pod"]
    # What another object made, such as the JobSet of a TrainJob, is that one's business.
    holders = [
        one for one in found if one["kind"] != "Pod" and not one["metadata"].get("ownerReferences")
    ]
    if not holders:
        raise NotRunning(
            f"the cluster knows no run `{name}`: it never was applied there, or it is deleted",
            hint=cluster.spell("kubectl", "get", "jobs", "-l", selector()),
        )
    if len(holders) > 1:
        both = " and a ".join(one["kind"] for one in holders)
        raise ConfigError(
            f"`{name}` is a {both}; a run has one",
            hint=cluster.spell("kubectl", "delete", holders[0]["kind"].lower(), name),
        )
    workload = None
    if QUEUE in holders[0]["metadata"].get("labels", {}):
        workload = _workload(cluster, holders[0]["metadata"]["uid"])
    warnings = ("get", "events", "--field-selector", "type=Warning", "-o", "json")
    events = items(ask(cluster, *warnings)) if has_events else []
    return state_of(holders[0], pods, workload, events)


def wait(
    cluster: Cluster, name: str, within: float, clock: Clock, tell: Callable[[str], None]
) -> RunState:
    """Look until a run has ended or is suspended; a cluster that is silent is asked again.

    Args:
        cluster: where.
        name: of the run.
        within: seconds; 0 for as long as it takes.
        clock: what time it is.
        tell: is called with a line when the cluster is silent, and when the state changes.

    Raises:
        DeadlineExceeded: it goes on after ``within``.
        ClusterUnavailable: nothing was heard of the cluster for ten minutes.
        NotRunning: there is no such run, or not any more.
    """
    began = heard = clock.monotonic_seconds()
    said, kinds = "", list[str]()
    while True:
        now = clock.monotonic_seconds()
        found, state, error = _try(cluster, name, kinds)
        if found and found.has_ended:
            return found
        heard = now if found else heard
        if error and now - heard > _SILENCE_SECONDS:
            raise error
        if state != said:
            tell(f"{name}: {state}")
        said = state
        left = began + within - now if within else _POLL_SECONDS
        if left <= 0:
            raise DeadlineExceeded(
                f"`{name}` has not ended within {within:g} s: {state}",
                deadline_seconds=within,
                hint=cluster.spell("resilient", "k8s", "status", name),
            )
        clock.sleep(min(_POLL_SECONDS, left))


def _try(
    cluster: Cluster, name: str, kinds: list[str]
) -> tuple[RunState | None, str, ClusterUnavailable | None]:
    """Return a run with its state, or why it could not be asked for."""
    try:
        kinds[:] = kinds or resources(cluster)
        found = look(cluster, name, kinds)
    except ClusterUnavailable as error:
        return None, "the cluster does not answer; it is asked again", error
    return found, found.state, None


def _served(cluster: Cluster, group: dict[str, Any]) -> set[str]:
    """Return the resources of a group: one that is there may serve others, such as MPIJobs."""
    paths = [f"/apis/{one['groupVersion']}" for one in group["versions"]]
    listed = [ask(cluster, "get", "--raw", path)["resources"] for path in paths]
    return {one["name"] for resources in listed for one in resources}


def _workload(cluster: Cluster, uid: str) -> dict[str, Any] | None:
    labelled = f"kueue.x-k8s.io/job-uid={uid}"
    asked = ("get", "workloads.kueue.x-k8s.io", "-l", labelled, "-o", "json")
    found = sorted(items(ask(cluster, *asked)), key=lambda one: one["metadata"]["name"])
    return found[-1] if found else None
