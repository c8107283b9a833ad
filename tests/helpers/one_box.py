"""A cluster in one box: starts the pods of a rendered Job and does with them what Kubernetes does.

Each index is an agent in a network namespace of its own, with the manifest's command, variables,
downward API, names of its peers, grace and failure policy. What it does not do: images, users,
volumes and limits are those of this machine, and a pod that replaces another has its address.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_ENTER = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'
_VARIABLE = re.compile(r"\$(\$|\((\w+)\))")
PATIENCE_SECONDS = 180.0


def action_for(rules, code, *, disrupted):
    """Return what a podFailurePolicy makes of a pod that failed: the first rule that matches."""
    for rule in rules:
        codes = rule.get("onExitCodes")
        if codes:
            if (code in codes["values"]) == (codes["operator"] == "In"):
                return rule["action"]
        elif disrupted:
            return rule["action"]
    return "Count"


@dataclass
class Pod:
    """One life of an index."""

    process: subprocess.Popen
    said: Path
    disrupted: bool = False
    killed_at: float | None = None


@dataclass
class Box:
    """The controller of one Job, and the nodes under it.

    Args:
        network: a namespace for each index.
        manifest: the Job.
        folder: for names and for what pods say.
        instead: environment variables that are this machine's and not the manifest's.
    """

    network: object
    manifest: dict
    folder: Path
    instead: dict
    pods: dict[int, Pod] = field(default_factory=dict)
    ends: list[tuple[int, int, str]] = field(default_factory=list)
    state: str = ""

    @property
    def spec(self):
        return self.manifest["spec"]

    @property
    def pod(self):
        return self.spec["template"]["spec"]

    @property
    def failures(self):
        return sum(action == "Count" for _, _, action in self.ends)

    def __enter__(self):
        for index in range(self.spec["completions"]):
            self._start(index)
        return self

    def __exit__(self, *_):
        for index in range(self.spec["completions"]):
            self.network[index].kill()
        for pod in self.pods.values():
            pod.process.wait()

    def preempt(self, index):
        """Evict a pod: the condition, SIGTERM, and SIGKILL after its grace."""
        pod = self.pods[index]
        pod.disrupted = True
        pod.killed_at = time.monotonic() + self.pod["terminationGracePeriodSeconds"]
        pod.process.terminate()

    def kill(self, index):
        """Take the node away without a word: no grace, and the condition afterwards."""
        self.pods[index].disrupted = True
        self.network[index].kill()

    def turn_until(self, holds, what):
        """Look after the pods until something holds, or the Job has ended."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.state and not holds():
            self._turn()
            assert time.monotonic() < deadline, f"waited in vain for {what}:\n{self.said()}"
            time.sleep(0.05)

    def said(self):
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}"
            for path in sorted(self.folder.glob("pod-*.txt"))
        )

    def _turn(self):
        for index, pod in list(self.pods.items()):
            if pod.killed_at and time.monotonic() > pod.killed_at:
                self.network[index].kill()
            code = pod.process.poll()
            if code is not None:
                # A container ends with its first process.
                self.network[index].kill()
                del self.pods[index]
                self._judge(index, 128 - code if code < 0 else code, pod)

    def _judge(self, index, code, pod):
        if code == 0:
            self.ends.append((index, 0, "Succeeded"))
            wanted = [one["succeededIndexes"] for one in self.spec["successPolicy"]["rules"]]
            self.state = "Complete" if str(index) in wanted else self.state
            return
        rules = self.spec["podFailurePolicy"]["rules"]
        action = action_for(rules, code, disrupted=pod.disrupted)
        self.ends.append((index, code, action))
        if action == "FailJob" or self.failures > self.spec["backoffLimit"]:
            self.state = "Failed"
        elif not self.state:
            self._start(index)

    def _start(self, index):
        container = self.pod["containers"][0]
        name = self.manifest["metadata"]["name"]
        env = {**os.environ, **self._environment(container, f"{name}-{index}")}
        words = [_expand(one, env) for one in (*container["command"], *container["args"])]
        assert words[0] == "resilient"
        hosts = self.folder / f"hosts-{index}"
        hosts.write_text(self._hosts(name, index))
        inside = (*self.network[index].inside, "unshare", "--mount", "sh", "-c", _ENTER, "pod")
        command = [*inside, f"{name}-{index}", str(hosts), sys.executable, "-m", "resilient_cli"]
        path = self.folder / f"pod-{index}-{len(self.ends)}.txt"
        with path.open("wb") as said:
            process = subprocess.Popen(
                [*command, *words[1:]],
                env=env,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pods[index] = Pod(process, path)

    def _environment(self, container, pod):
        fields = {
            "metadata.name": pod,
            "metadata.namespace": "default",
            "spec.nodeName": "box",
            "metadata.labels['batch.kubernetes.io/controller-uid']": "uid-of-the-job",
        }
        made = {}
        for one in container["env"]:
            source = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            made[one["name"]] = fields[source] if source else _expand(one["value"], made)
        return made | self.instead

    def _hosts(self, name, own):
        """Return what kubelet writes for the pod itself, and what DNS says of the others."""
        lines = ["127.0.0.1 localhost"]
        for index in range(self.spec["completions"]):
            whole = f"{name}-{index}.{self.pod['subdomain']}.default.svc.cluster.local"
            short = f" {name}-{index}" if index == own else ""
            lines.append(f"{self.network.address(index)} {whole}{short}")
        return "\n".join(lines) + "\n"


def _expand(text, values):
    """Return a text with `$(NAME)` looked up and `$$` as `$`, as Kubernetes does."""
    return _VARIABLE.sub(lambda one: values.get(one[2], one[0]) if one[2] else "$", text)
