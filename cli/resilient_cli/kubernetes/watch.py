"""Wait, logs.

To look at a run in a cluster, and to wait for its end.

To read what pods print: once, or to the end, through preemptions and lost connections.
"""

from __future__ import annotations

import re
import subprocess
import threading
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import IO, TYPE_CHECKING, Any, cast

from resilient.errors import (
    ClusterUnavailable,
    ConfigError,
    DeadlineExceeded,
    NotRunning,
    UsageError,
)
from resilient_cli.kubernetes.kubectl import ask, command, items, refusal
from resilient_cli.kubernetes.manifests import selector
from resilient_cli.kubernetes.spec import Flavor
from resilient_cli.kubernetes.status import QUEUE, state_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from resilient.clock import Clock
    from resilient_cli.kubernetes.kubectl import Cluster
    from resilient_cli.kubernetes.status import PodState, RunState

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


def get_run(
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
        found = get_run(cluster, name, kinds)
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


_FOLLOW_POLL_SECONDS = 2.0
_STYLE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NOT_YET = ("Pending", "ContainerCreating", "PodInitializing")


@dataclass(frozen=True, slots=True)
class LogQuery:
    """Which lines are wanted.

    Attributes:
        index: of the pod; None for all.
        previous: whether of the pod, or of the container, before the newest.
        tail: only the last so many of each pod; -1 for all.
    """

    index: int | None = None
    previous: bool = False
    tail: int = -1


@dataclass(frozen=True, slots=True)
class PodLogLine:
    """A line that a pod printed, and when; colours and what a bar overwrote are left out."""

    index: int
    pod: str
    time: str
    text: str


def read(cluster: Cluster, run: RunState, asked: LogQuery) -> Iterator[PodLogLine]:
    """Yield the lines that are there, pod after pod.

    Raises:
        NotRunning: there is no such pod.
        ClusterUnavailable: the cluster does not answer, or not to the end.
    """
    chosen = _chosen(run, asked)
    if not chosen:
        which = "pod" if asked.index is None else f"pod of index {asked.index}"
        before = " before the newest" if asked.previous else ""
        raise NotRunning(
            f"`{run.name}` has no {which}{before}",
            hint=cluster.spell("resilient", "k8s", "status", run.name),
        )
    for pod, more in chosen:
        yield from _Stream(cluster, pod, asked.tail).lines(*more)


def follow(
    cluster: Cluster, name: str, asked: LogQuery, clock: Clock, emit: Callable[[PodLogLine], None]
) -> None:
    """Hand on lines as they come until the run has ended, from the pods of replacements too.

    Raises:
        UsageError: what is previous does not go on.
        NotRunning: there is no such run.
    """
    if asked.previous:
        raise UsageError("--previous and --follow exclude each other")
    lines: SimpleQueue[PodLogLine] = SimpleQueue()
    streams: dict[str, _Stream] = {}
    try:
        while True:
            try:
                run = get_run(cluster, name)
            except ClusterUnavailable:
                run = None
            pods = {one.name: one for one in _begun(run, asked)} if run else {}
            for name_of_pod, pod in pods.items():
                streams.setdefault(name_of_pod, _Stream(cluster, pod, asked.tail))
                streams[name_of_pod].go_on(lines, has_ended=pod.exit_code is not None)
            _hand_on(lines, emit, clock, _FOLLOW_POLL_SECONDS)
            if run and run.has_ended and all(streams[one].is_read for one in pods):
                _hand_on(lines, emit, clock, 0.0)
                return
    finally:
        for one in streams.values():
            one.stop()


class _Stream:
    """What one pod prints; can be read on from where a connection was lost."""

    def __init__(self, cluster: Cluster, pod: PodState, tail: int) -> None:
        self._cluster, self._pod, self._tail = cluster, pod, tail
        self._last = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self.is_read = False

    def lines(self, *more: str) -> Iterator[PodLogLine]:
        """Yield the lines behind those that were read before."""
        since = (f"--since-time={self._last}",) if self._last else (f"--tail={self._tail}",)
        which = (self._pod.name, "-c", self._pod.container)
        called = command(self._cluster, "logs", *which, "--timestamps", *since, *more)
        with subprocess.Popen(  # noqa: S603 - the user's own kubectl, and checked words
            called, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            self._process = process
            before = self._last
            for raw in cast("IO[bytes]", process.stdout):
                time, _, text = raw.decode(errors="replace").rstrip("\r\n").partition(" ")
                # A time in the request has no fractions, so some lines come again.
                if time > before:
                    self._last = time
                    yield PodLogLine(self._pod.index, self._pod.name, time, _clean(text))
            said = cast("IO[bytes]", process.stderr).read().decode(errors="replace")
        if process.returncode:
            raise refusal(self._cluster, said)

    def go_on(self, lines: SimpleQueue[PodLogLine], *, has_ended: bool) -> None:
        """Read in the background, again if the connection was lost before the end."""
        if self.is_read or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(target=self._pump, args=(lines, has_ended), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End kubectl."""
        if self._process is not None:
            self._process.terminate()
        if self._thread is not None:
            self._thread.join()

    def _pump(self, lines: SimpleQueue[PodLogLine], has_ended: bool) -> None:  # noqa: FBT001 - of a thread
        try:
            for one in self.lines("--follow"):
                lines.put(one)
        except (ClusterUnavailable, NotRunning):
            return
        # A stream that ends while its pod runs may have been cut.
        self.is_read = has_ended


def _chosen(run: RunState, asked: LogQuery) -> list[tuple[PodState, tuple[str, ...]]]:
    found: list[tuple[PodState, tuple[str, ...]]] = []
    for index, newest in sorted(run.newest().items()):
        if asked.index not in (None, index):
            continue
        older = [one for one in run.pods if one.index == index and one is not newest]
        if not asked.previous:
            found.append((newest, ()))
        elif newest.restarts:
            found.append((newest, ("--previous",)))
        elif older:
            found.append((older[-1], ()))
    return found


def _begun(run: RunState, asked: LogQuery) -> list[PodState]:
    """Return the pods that print or have printed; the older ones of an index end by themselves."""
    return [
        one
        for one in run.pods
        if asked.index in (None, one.index)
        and (one.phase not in _NOT_YET or one.exit_code is not None)
    ]


def _hand_on(
    lines: SimpleQueue[PodLogLine], emit: Callable[[PodLogLine], None], clock: Clock, within: float
) -> None:
    """Hand on what is there, and what comes within so many seconds."""
    until = clock.monotonic_seconds() + within
    while True:
        try:
            emit(lines.get(timeout=max(0.001, until - clock.monotonic_seconds())))
        except Empty:
            return


def _clean(text: str) -> str:
    return _STYLE.sub("", text.rpartition("\r")[2]).expandtabs(4)
