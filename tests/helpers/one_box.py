"""A cluster in one box: starts the pods of a rendered Job and does with them what Kubernetes does.

Each index is an agent in a network namespace of its own, with the manifest's command, variables,
downward API, names of its peers and grace; ``job_controller`` decides what becomes of those that
end. What it does not do: images, users, volumes and limits are those of this machine, and a pod
that replaces another has its address.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.helpers.job_controller import Controller

if TYPE_CHECKING:
    from pathlib import Path

# Files alone say which names there are: a name that has no pod is unknown at once, as in a cluster.
_ENTER = """
hostname "$1"
mount --bind "$2" /etc/hosts
mount --bind "$3" /etc/nsswitch.conf
shift 3
exec "$@"
"""
# What an image says, here what this machine says; all else that a pod has is from its manifest.
_IMAGE = ("PATH", "PYTHONPATH", "OMP_NUM_THREADS")
_VARIABLE = re.compile(r"\$(\$|\((\w+)\))")
PATIENCE_SECONDS = 180.0


@dataclass
class Pod:
    """One life of an index."""

    process: subprocess.Popen
    disrupted: bool = False
    killed_at: float | None = None


@dataclass
class Box:
    """The controller of one Job, and the nodes under it.

    Args:
        network: a namespace for each index that there may ever be.
        manifest: the Job.
        folder: for names and for what pods say.
        instead: environment variables that are this machine's and not the manifest's.
        pace: seconds here for each second that Kubernetes delays new pods after a failure.

    Attributes:
        delays: how long Kubernetes would have waited before it made pods anew, each time.
    """

    network: object
    manifest: dict
    folder: Path
    instead: dict
    pace: float = 0.001
    pods: dict[int, Pod] = field(default_factory=dict)
    delays: list[float] = field(default_factory=list)
    _pending: set[int] = field(default_factory=set)
    _nodes_at: dict[int, float] = field(default_factory=dict)
    _lives: int = 0

    def __post_init__(self):
        self.controller = Controller(self.manifest["spec"])
        (self.folder / "nsswitch").write_text("hosts: files\n")

    @property
    def pod(self):
        return self.manifest["spec"]["template"]["spec"]

    @property
    def ends(self):
        return self.controller.ends

    @property
    def state(self):
        return self.controller.state

    @property
    def failures(self):
        return self.controller.failed

    def __enter__(self):
        self._turn()
        return self

    def __exit__(self, *_):
        for index, pod in self.pods.items():
            self.network[index].kill()
            pod.process.wait()

    def preempt(self, index, away=0.0):
        """Evict a pod: the condition, SIGTERM, and SIGKILL after its grace.

        Args:
            index: of the pod.
            away: seconds until there is a node for the next one, which is pending till then.
        """
        self.pods[index].disrupted = True
        self._nodes_at[index] = time.monotonic() + away
        self.delete(index)

    def delete(self, index):
        """Delete a pod as `kubectl delete pod` does: its grace, and no condition."""
        pod = self.pods[index]
        if pod.killed_at is None:
            pod.killed_at = time.monotonic() + self.pod["terminationGracePeriodSeconds"]
            pod.process.terminate()

    def lose(self, index):
        """Take the node away without a word: no grace, and the condition once it is found gone."""
        self.pods[index].disrupted = True
        self.kill(index)

    def kill(self, index):
        """SIGKILL all of a pod, and let nobody say why."""
        self.network[index].kill()

    def drain(self):
        """Evict all pods at once."""
        for index in self.pods:
            self.preempt(index)

    def scale(self, size):
        """Patch completions and parallelism of the Job."""
        self.controller.scale(size)

    def turn_until(self, holds, expectation):
        """Look after the pods until something holds, or the Job has ended and its pods too."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not holds() and not (self.state and not self.pods):
            self._turn()
            assert time.monotonic() < deadline, f"waited in vain for {expectation}:\n{self.said()}"
            time.sleep(0.05)

    def figures(self):
        """Return what the Job counted, and how long Kubernetes would have delayed its pods."""
        figures = {"pods": self._lives, "failures": self.failures}
        return {**figures, "delays": len(self.delays), "delayed_seconds": sum(self.delays)}

    def said(self):
        texts = {path: path.read_text(errors="replace") for path in self.folder.glob("pod-*.txt")}
        parts = (f"== {path.name}\n{text[-2000:]}" for path, text in sorted(texts.items()))
        return "\n".join([str(self.ends), *parts])

    def _turn(self):
        now = time.monotonic()
        for index, pod in list(self.pods.items()):
            if pod.killed_at and now > pod.killed_at:
                self.network[index].kill()
            code = pod.process.poll()
            if code is not None:
                # A container ends with its first process.
                self.network[index].kill()
                del self.pods[index]
                self._tell_names(self.pods)
                code = 128 - code if code < 0 else code
                self.controller.ended(index, code, now / self.pace, is_disrupted=pod.disrupted)
        for index in self.controller.surplus(self.pods):
            self.delete(index)
        self._pending -= set(self.controller.surplus(self._pending))
        self._make(now)

    def _make(self, now):
        due = self.controller.due({*self.pods, *self._pending}, now / self.pace)
        if due and self.controller.delay:
            self.delays.append(self.controller.delay)
        self._pending |= set(due)
        pods_due = {pod for pod in self._pending if self._nodes_at.get(pod, 0.0) <= now}
        self._pending -= pods_due
        for index in sorted(pods_due):
            self._start(index)

    def _start(self, index):
        container = self.pod["containers"][0]
        name = f"{self.manifest['metadata']['name']}-{index}"
        environment = self._environment(container, name)
        command_words = [
            _expand(word, environment) for word in (*container["command"], *container["args"])
        ]
        assert command_words[0] == "resilient"
        self._lives += 1
        inside = (*self.network[index].inside, "unshare", "--mount", "sh", "-e", "-c", _ENTER)
        files = (str(self.folder / f"hosts-{index}"), str(self.folder / "nsswitch"))
        command = [*inside, "pod", name, *files, sys.executable, "-m", "resilient_cli"]
        self._tell_names({*self.pods, index})
        with (self.folder / f"pod-{self._lives:03d}-{index}.txt").open("wb") as output:
            process = subprocess.Popen(
                [*command, *command_words[1:]],
                env={word: os.environ[word] for word in _IMAGE if word in os.environ} | environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pods[index] = Pod(process)

    def _environment(self, container, pod):
        fields = {
            "metadata.name": pod,
            "metadata.namespace": "default",
            "spec.nodeName": "box",
            "metadata.labels['batch.kubernetes.io/controller-uid']": "uid-of-the-job",
        }
        variables = {}
        for entry in container["env"]:
            source = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            variables[entry["name"]] = (
                fields[source] if source else _expand(entry["value"], variables)
            )
        return variables | self.instead

    def _tell_names(self, pods):
        """Write what kubelet says of the pod itself, and DNS of the others, for each that is there.

        A file is written in place, for pods have it mounted; never is a pod's own name missing.
        """
        name, domain = self.manifest["metadata"]["name"], self.pod["subdomain"]
        for own_pod in pods:
            lines = ["127.0.0.1 localhost"]
            for index in sorted(pods, key=lambda pod, own_pod=own_pod: (pod != own_pod, pod)):
                whole = f"{name}-{index}.{domain}.default.svc.cluster.local"
                short = f" {name}-{index}" if index == own_pod else ""
                lines.append(f"{self.network.address(index)} {whole}{short}")
            _overwrite(self.folder / f"hosts-{own_pod}", "\n".join(lines).encode() + b"\n")


def _overwrite(path, content):
    """Write all at once over what is there, and only then cut off what is left of it."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(file, content, 0)
        os.ftruncate(file, len(content))
    finally:
        os.close(file)


def _expand(text, values):
    """Return a text with `$(NAME)` looked up and `$$` as `$`, as Kubernetes does."""
    return _VARIABLE.sub(lambda match: values.get(match[2], match[0]) if match[2] else "$", text)
