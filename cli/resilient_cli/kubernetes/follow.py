"""To read what pods print: once, or to the end, through preemptions and lost connections."""

from __future__ import annotations

import re
import subprocess
import threading
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import IO, TYPE_CHECKING, cast

from resilient.errors import ClusterUnavailable, NotRunning, UsageError
from resilient_cli.kubernetes.kubectl import command, refusal
from resilient_cli.kubernetes.look import look

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from resilient.clock import Clock
    from resilient_cli.kubernetes.kubectl import Cluster
    from resilient_cli.kubernetes.states import PodState, RunState

_POLL_SECONDS = 2.0
_STYLE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NOT_YET = ("Pending", "ContainerCreating", "PodInitializing")


@dataclass(frozen=True, slots=True)
class Asked:
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
class Line:
    """A line that a pod printed, and when; colours and what a bar overwrote are left out."""

    index: int
    pod: str
    time: str
    text: str


def read(cluster: Cluster, run: RunState, asked: Asked) -> Iterator[Line]:
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
    cluster: Cluster, name: str, asked: Asked, clock: Clock, emit: Callable[[Line], None]
) -> None:
    """Hand on lines as they come until the run has ended, from the pods of replacements too.

    Raises:
        UsageError: what is previous does not go on.
        NotRunning: there is no such run.
    """
    if asked.previous:
        raise UsageError("--previous and --follow exclude each other")
    lines: SimpleQueue[Line] = SimpleQueue()
    streams: dict[str, _Stream] = {}
    try:
        while True:
            try:
                run = look(cluster, name)
            except ClusterUnavailable:
                run = None
            pods = {one.name: one for one in _begun(run, asked)} if run else {}
            for name_of_pod, pod in pods.items():
                streams.setdefault(name_of_pod, _Stream(cluster, pod, asked.tail))
                streams[name_of_pod].go_on(lines, has_ended=pod.exit_code is not None)
            _hand_on(lines, emit, clock, _POLL_SECONDS)
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

    def lines(self, *more: str) -> Iterator[Line]:
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
                    yield Line(self._pod.index, self._pod.name, time, _clean(text))
            said = cast("IO[bytes]", process.stderr).read().decode(errors="replace")
        if process.returncode:
            raise refusal(self._cluster, said)

    def go_on(self, lines: SimpleQueue[Line], *, has_ended: bool) -> None:
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

    def _pump(self, lines: SimpleQueue[Line], has_ended: bool) -> None:  # noqa: FBT001 - of a thread
        try:
            for one in self.lines("--follow"):
                lines.put(one)
        except (ClusterUnavailable, NotRunning):
            return
        # A stream that ends while its pod runs may have been cut.
        self.is_read = has_ended


def _chosen(run: RunState, asked: Asked) -> list[tuple[PodState, tuple[str, ...]]]:
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


def _begun(run: RunState, asked: Asked) -> list[PodState]:
    """Return the pods that print or have printed; the older ones of an index end by themselves."""
    return [
        one
        for one in run.pods
        if asked.index in (None, one.index)
        and (one.phase not in _NOT_YET or one.exit_code is not None)
    ]


def _hand_on(
    lines: SimpleQueue[Line], emit: Callable[[Line], None], clock: Clock, within: float
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
