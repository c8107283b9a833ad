"""State, end and logs of a run in a cluster.

The module reads the logs once, or follows the logs until the run ends. After a preemption or a lost
connection, the module continues to follow the logs.
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
"""Group and name of the resource that holds a run's pods; for Kueue it is a Job."""
_POLL_SECONDS = 5.0
_SILENCE_SECONDS = 600.0


def resources(cluster: Cluster) -> list[str]:
    """Return the resources of a cluster that can hold a run."""
    groups = {
        api_group["name"]: api_group
        for api_group in ask(cluster, "get", "--raw", "/apis")["groups"]
    }
    return [
        f"{name}.{group}"
        for group, name in HOLDERS.values()
        if group in groups and name in _served_resources(cluster, groups[group])
    ]


def find(cluster: Cluster, name: str, kinds: list[str]) -> list[dict[str, Any]]:
    """Return a run's objects of the given kinds."""
    arguments = ("get", ",".join(kinds), "-l", selector(name), "-o", "json")
    return items(ask(cluster, *arguments))


def get_run(
    cluster: Cluster, name: str, kinds: list[str] | None = None, *, has_events: bool = False
) -> RunState:
    """Return the state of a run in a cluster.

    Args:
        cluster: Cluster and namespace.
        name: Name of the run.
        kinds: Resources that can hold the run, if they are known already.
        has_events: Whether to read warnings too.

    Raises:
        NotRunning: The cluster has no run of that name.
        ConfigError: The cluster has two runs of that name, of different flavors.
        ClusterUnavailable: The cluster does not answer.
    """
    objects = find(cluster, name, [*(kinds or resources(cluster)), "pods"])
    pods = [manifest for manifest in objects if manifest["kind"] == "Pod"]
    # Skip objects that another object owns, such as the JobSet of a TrainJob.
    holders = [
        manifest
        for manifest in objects
        if manifest["kind"] != "Pod" and not manifest["metadata"].get("ownerReferences")
    ]
    if not holders:
        raise NotRunning(
            f"the cluster has no run `{name}`: it was never applied there, or it was deleted",
            hint=cluster.command_text("kubectl", "get", "jobs", "-l", selector()),
        )
    if len(holders) > 1:
        kinds_text = " and a ".join(holder["kind"] for holder in holders)
        raise ConfigError(
            f"`{name}` is a {kinds_text}; a run has exactly one of them",
            hint=cluster.command_text("kubectl", "delete", holders[0]["kind"].lower(), name),
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
    """Poll until a run has ended or is suspended; a cluster that does not answer is polled again.

    Args:
        cluster: Cluster and namespace.
        name: Name of the run.
        within: Deadline in seconds; 0 for none.
        clock: Source of the time.
        tell: Callback with a line when the cluster does not answer, and when the state changes.

    Raises:
        DeadlineExceeded: The run has not ended within the deadline.
        ClusterUnavailable: The cluster has not answered for 10 min.
        NotRunning: The run does not exist, or was deleted meanwhile.
    """
    start_seconds = last_answer = clock.monotonic_seconds()
    last_state, kinds = "", list[str]()
    while True:
        now_seconds = clock.monotonic_seconds()
        run, state, error = _get_run_or_error(cluster, name, kinds)
        if run and run.has_ended:
            return run
        last_answer = now_seconds if run else last_answer
        if error and now_seconds - last_answer > _SILENCE_SECONDS:
            raise error
        if state != last_state:
            tell(f"{name}: {state}")
        last_state = state
        seconds_left = start_seconds + within - now_seconds if within else _POLL_SECONDS
        if seconds_left <= 0:
            raise DeadlineExceeded(
                f"`{name}` has not ended within {within:g} s: {state}",
                deadline_seconds=within,
                hint=cluster.command_text("resilient", "k8s", "status", name),
            )
        clock.sleep(min(_POLL_SECONDS, seconds_left))


def _get_run_or_error(
    cluster: Cluster, name: str, kinds: list[str]
) -> tuple[RunState | None, str, ClusterUnavailable | None]:
    """Return a run with its state, or the error if the cluster does not answer."""
    try:
        kinds[:] = kinds or resources(cluster)
        run = get_run(cluster, name, kinds)
    except ClusterUnavailable as error:
        return None, "the cluster does not answer; retrying", error
    return run, run.state, None


def _served_resources(cluster: Cluster, group: dict[str, Any]) -> set[str]:
    """Return the resources of a group; a group may exist with other resources, such as MPIJobs."""
    paths = [f"/apis/{version['groupVersion']}" for version in group["versions"]]
    resource_lists = [ask(cluster, "get", "--raw", path)["resources"] for path in paths]
    return {resource["name"] for resources in resource_lists for resource in resources}


def _workload(cluster: Cluster, uid: str) -> dict[str, Any] | None:
    label = f"kueue.x-k8s.io/job-uid={uid}"
    arguments = ("get", "workloads.kueue.x-k8s.io", "-l", label, "-o", "json")
    workloads = sorted(
        items(ask(cluster, *arguments)), key=lambda manifest: manifest["metadata"]["name"]
    )
    return workloads[-1] if workloads else None


_FOLLOW_POLL_SECONDS = 2.0
_STYLE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PHASES_BEFORE_START = ("Pending", "ContainerCreating", "PodInitializing")


@dataclass(frozen=True, slots=True)
class LogQuery:
    """Selection of log lines.

    Attributes:
        index: Index of the pod; None for all.
        previous: Whether to read the pod or container before the newest pod or container.
        tail: Number of last lines of each pod; -1 for all.
    """

    index: int | None = None
    previous: bool = False
    tail: int = -1


@dataclass(frozen=True, slots=True)
class PodLogLine:
    """Line that a pod printed, with its time, but without colours and overwritten text."""

    index: int
    pod: str
    time: str
    text: str


def read(cluster: Cluster, run: RunState, query: LogQuery) -> Iterator[PodLogLine]:
    """Yield the lines that exist, pod after pod.

    Raises:
        NotRunning: The run has no such pod.
        ClusterUnavailable: The cluster does not answer, or the connection breaks.
    """
    containers = _select_containers(run, query)
    if not containers:
        pod_text = "pod" if query.index is None else f"pod of index {query.index}"
        attempt_text = " before the newest" if query.previous else ""
        raise NotRunning(
            f"`{run.name}` has no {pod_text}{attempt_text}",
            hint=cluster.command_text("resilient", "k8s", "status", run.name),
        )
    for pod, log_options in containers:
        yield from _Stream(cluster, pod, query.tail).lines(*log_options)


def follow(
    cluster: Cluster, name: str, query: LogQuery, clock: Clock, emit: Callable[[PodLogLine], None]
) -> None:
    """Emit lines as they come until the run has ended, also from replacement pods.

    Raises:
        UsageError: The lines of a previous pod cannot be followed.
        NotRunning: The run does not exist.
    """
    if query.previous:
        raise UsageError("--previous and --follow exclude each other")
    lines: SimpleQueue[PodLogLine] = SimpleQueue()
    streams: dict[str, _Stream] = {}
    try:
        while True:
            try:
                run = get_run(cluster, name)
            except ClusterUnavailable:
                run = None
            pods = (
                {pod_status.name: pod_status for pod_status in _select_started_pods(run, query)}
                if run
                else {}
            )
            for name_of_pod, pod in pods.items():
                streams.setdefault(name_of_pod, _Stream(cluster, pod, query.tail))
                streams[name_of_pod].read_in_background(lines, has_ended=pod.exit_code is not None)
            _emit_lines(lines, emit, clock, _FOLLOW_POLL_SECONDS)
            if run and run.has_ended and all(streams[pod_name].is_read for pod_name in pods):
                _emit_lines(lines, emit, clock, 0.0)
                return
    finally:
        for stream in streams.values():
            stream.stop()


class _Stream:
    """Log of one pod; reading can continue after a lost connection."""

    def __init__(self, cluster: Cluster, pod: PodState, tail: int) -> None:
        self._cluster, self._pod, self._tail = cluster, pod, tail
        self._last = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self.is_read = False

    def lines(self, *more: str) -> Iterator[PodLogLine]:
        """Yield the lines that were not read before."""
        range_options = (f"--since-time={self._last}",) if self._last else (f"--tail={self._tail}",)
        container = (self._pod.name, "-c", self._pod.container)
        command_line = command(
            self._cluster, "logs", *container, "--timestamps", *range_options, *more
        )
        with subprocess.Popen(  # noqa: S603 - the user's own kubectl, and checked words
            command_line, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            self._process = process
            last_time = self._last
            for raw_line in cast("IO[bytes]", process.stdout):
                time, _, text = raw_line.decode(errors="replace").rstrip("\r\n").partition(" ")
                # The time in the request has no fractions of a second, so some lines come again.
                if time > last_time:
                    self._last = time
                    yield PodLogLine(
                        self._pod.index, self._pod.name, time, _remove_terminal_codes(text)
                    )
            error_text = cast("IO[bytes]", process.stderr).read().decode(errors="replace")
        if process.returncode:
            raise refusal(self._cluster, error_text)

    def read_in_background(self, lines: SimpleQueue[PodLogLine], *, has_ended: bool) -> None:
        """Read in a background thread; start again if the connection was lost before the end."""
        if self.is_read or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(
            target=self._read_lines, args=(lines, has_ended), daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Terminate kubectl and wait for the thread."""
        if self._process is not None:
            self._process.terminate()
        if self._thread is not None:
            self._thread.join()

    def _read_lines(self, lines: SimpleQueue[PodLogLine], has_ended: bool) -> None:  # noqa: FBT001 - of a thread
        try:
            for line in self.lines("--follow"):
                lines.put(line)
        except (ClusterUnavailable, NotRunning):
            return
        # If a stream ends while its pod runs, its connection may be lost.
        self.is_read = has_ended


def _select_containers(run: RunState, query: LogQuery) -> list[tuple[PodState, tuple[str, ...]]]:
    containers: list[tuple[PodState, tuple[str, ...]]] = []
    for index, newest in sorted(run.newest().items()):
        if query.index not in (None, index):
            continue
        older = [pod for pod in run.pods if pod.index == index and pod is not newest]
        if not query.previous:
            containers.append((newest, ()))
        elif newest.restarts:
            containers.append((newest, ("--previous",)))
        elif older:
            containers.append((older[-1], ()))
    return containers


def _select_started_pods(run: RunState, query: LogQuery) -> list[PodState]:
    """Return the pods that have started; the older pods of an index end by themselves."""
    return [
        pod
        for pod in run.pods
        if query.index in (None, pod.index)
        and (pod.phase not in _PHASES_BEFORE_START or pod.exit_code is not None)
    ]


def _emit_lines(
    lines: SimpleQueue[PodLogLine], emit: Callable[[PodLogLine], None], clock: Clock, within: float
) -> None:
    """Emit the queued lines, and the lines that arrive within the given seconds."""
    deadline_seconds = clock.monotonic_seconds() + within
    while True:
        try:
            emit(lines.get(timeout=max(0.001, deadline_seconds - clock.monotonic_seconds())))
        except Empty:
            return


def _remove_terminal_codes(text: str) -> str:
    return _STYLE.sub("", text.rpartition("\r")[2]).expandtabs(4)
