"""Client of a cluster that runs the user's own kubectl and parses the JSON output of kubectl."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

from resilient.errors import (
    ClusterConflict,
    ClusterDenied,
    ClusterUnavailable,
    ConfigError,
    NotRunning,
    ResilientError,
)

_SECONDS = 120.0
_REQUEST = "--request-timeout=30s"
_REASON = re.compile(r"Error from server \(([A-Za-z]+)\)")
# Lines of kubectl's own log, which repeat the error before it is printed.
_LOGGED = re.compile(r"[EWI][0-9]{4} ")
_DENIED = ("Forbidden", "Unauthorized")
_SILENT = ("InternalError", "ServiceUnavailable", "Timeout", "ServerTimeout", "TooManyRequests")
_CUT = (
    *("Unable to connect", "connection to the server", "connection refused", "reset by peer"),
    *("unexpected EOF", ": EOF", "TLS handshake", "i/o timeout", "connection lost"),
    *("no such host", "deadline exceeded", "no route to host", "broken pipe"),
    # We request only resources that the cluster listed, so kubectl's discovery was cut short.
    "the server doesn't have a resource type",
)

_INSTALL = (
    'curl -LO "https://dl.k8s.io/release/$(curl -Ls https://dl.k8s.io/release/stable.txt)'
    '/bin/linux/amd64/kubectl" && install -m 755 kubectl ~/.local/bin/'
)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Cluster and namespace in the terms of kubectl; an empty text means kubectl's default."""

    context: str = ""
    namespace: str = ""
    kubeconfig: str = ""

    @property
    def options(self) -> tuple[str, ...]:
        """Options that select the cluster, for kubectl and for our own commands."""
        options = {
            "--context": self.context,
            "--namespace": self.namespace,
            "--kubeconfig": self.kubeconfig,
        }
        return tuple(f"{option}={text}" for option, text in options.items() if text)

    def command_text(self, *words: str) -> str:
        """Return a command line with the options of this cluster."""
        return shlex.join([*words, *self.options])


def command(cluster: Cluster, *arguments: str) -> list[str]:
    """Return the command line of a kubectl call.

    Raises:
        ConfigError: kubectl is not on the PATH.
    """
    path = shutil.which("kubectl")
    if path is None:
        raise ConfigError("no kubectl on the PATH of this machine", hint=_INSTALL)
    return [path, *cluster.options, *arguments]


def ask(cluster: Cluster, *arguments: str, document: str = "", is_json: bool = True) -> Any:
    """Call kubectl and return its JSON output; None without output, or if ``is_json`` is false.

    Raises:
        ConfigError: kubectl is missing, or it refused the request; the message quotes kubectl.
        NotRunning: The requested object does not exist.
        ClusterDenied: The cluster does not know the user, or denies the request.
        ClusterConflict: The request would change a field of another tool.
        ClusterUnavailable: The cluster does not answer, or asks for a later retry.
    """
    arguments_of_kubectl = command(cluster, *arguments, _REQUEST)
    try:
        process = subprocess.run(  # noqa: S603 - the user's own kubectl, and checked words
            arguments_of_kubectl,
            input=document,
            capture_output=True,
            text=True,
            check=False,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterUnavailable(f"kubectl did not answer within {_SECONDS:g} s") from error
    if process.returncode:
        raise refusal(cluster, process.stderr)
    return json.loads(process.stdout) if is_json and process.stdout.strip() else None


def items(document: Any) -> list[dict[str, Any]]:
    """Return the objects of an answer, which holds none, one, or a list."""
    if document is None:
        return []
    objects: list[dict[str, Any]] = (
        document["items"] if document["kind"].endswith("List") else [document]
    )
    return objects


def refusal(cluster: Cluster, output: str) -> ResilientError:
    """Return the error that the stderr of kubectl describes."""
    lines = [line for line in output.splitlines() if line.strip() and not _LOGGED.match(line)]
    text = (
        " ".join(" ".join(dict.fromkeys(lines or output.splitlines()[-1:])).split())
        or "kubectl printed no error"
    )
    text = text.partition(" Please review the fields above")[0].removeprefix("error: ")
    match = _REASON.search(text)
    reason = match[1] if match else ""
    if reason in _DENIED or "(Unauthorized)" in text or "provide credentials" in text:
        whoami_command = cluster.command_text("kubectl", "auth", "whoami")
        return ClusterDenied(text, hint=whoami_command)
    if reason == "NotFound":
        return NotRunning(text, hint=cluster.command_text("kubectl", "get", "jobs,pods"))
    if reason == "Conflict" or text.startswith("Apply failed with"):
        jobs_command = cluster.command_text(
            "kubectl", "get", "jobs", "-o", "yaml", "--show-managed-fields"
        )
        return ClusterConflict(text, hint=jobs_command)
    if reason in _SILENT or (not reason and any(phrase in text for phrase in _CUT)):
        return ClusterUnavailable(text, hint=cluster.command_text("kubectl", "cluster-info"))
    return ConfigError(text, hint=cluster.command_text("kubectl", "config", "get-contexts"))
