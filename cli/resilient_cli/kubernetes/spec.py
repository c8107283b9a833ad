"""Specification of a run on Kubernetes, checked against the rules of an API server.

The specification includes the cloud identity of the pods. The specification also includes the
networks outside the run that the pods may reach.
"""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError
from resilient_cli import preemption_budget
from resilient_cli.launch_checks import (
    RENDEZVOUS_OPTIONS,
    has_credentials,
    is_secret,
    is_variable,
    refuse_system_options,
    secret_option,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PORT_MAX = 65535
_ANNOTATIONS = {
    "irsa": "eks.amazonaws.com/role-arn",
    "gke": "iam.gke.io/gcp-service-account",
    "azure": "azure.workload.identity/client-id",
}
_CREDENTIAL_SERVICES = {
    "eks": (("169.254.170.23/32",), (80,)),
    "gke": (("169.254.169.252/32", "169.254.169.254/32"), (80, 988)),
}
"""Networks and ports that serve credentials, for kinds without a file that a webhook mounts."""
_KINDS = "eks, irsa=ROLE_ARN, gke=SERVICE_ACCOUNT or azure=CLIENT_ID"


@dataclass(frozen=True, slots=True)
class Identity:
    """Cloud identity of the pods; none by default.

    Attributes:
        kind: ``eks`` (Pod Identity), ``irsa``, ``gke``, ``azure`` (Workload ID), or empty.
        value: Role, service account or client; empty for Pod Identity (the cloud has the role).
    """

    kind: str = ""
    value: str = ""

    @property
    def annotations(self) -> dict[str, str]:
        """Annotations of the ServiceAccount."""
        return {_ANNOTATIONS[self.kind]: self.value} if self.value else {}

    @property
    def labels(self) -> dict[str, str]:
        """Additional labels of the pods."""
        return {"azure.workload.identity/use": "true"} if self.kind == "azure" else {}

    @property
    def egress(self) -> list[dict[str, Any]]:
        """Egress rules for the service that hands out credentials."""
        blocks, ports = _CREDENTIAL_SERVICES.get(self.kind, ((), ()))
        return [rule(blocks, ports)] if blocks else []


NO_IDENTITY = Identity()


def parse_identity(text: str) -> Identity:
    """Parse ``--identity``.

    Raises:
        ConfigError: The kind is unknown, or its value is missing, not allowed or has blanks.
    """
    kind, _, value = text.partition("=")
    if text and (kind not in {"eks", *_ANNOTATIONS} or (kind == "eks") is bool(value)):
        raise ConfigError(f"--identity {text!r} is not {_KINDS}")
    if any(not character.isprintable() or character.isspace() for character in value):
        raise ConfigError(f"--identity {text!r}: a name has no blanks")
    return Identity(kind, value)


def parse_egress(texts: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Parse the networks and ports of ``--egress CIDR:PORT``.

    Raises:
        ConfigError: An entry is not CIDR:PORT.
    """
    rules = []
    for text in texts:
        network, _, port = text.rpartition(":")
        if not port.isdecimal() or not 0 < int(port) <= PORT_MAX:
            raise ConfigError(f"--egress {text!r} is not CIDR:PORT: 10.0.0.0/8:9000")
        try:
            rules.append((str(ipaddress.ip_network(network)), int(port)))
        except ValueError as error:
            raise ConfigError(
                f"--egress {text!r}: {error}; give CIDR:PORT, such as 10.0.0.0/8:9000"
            ) from error
    return tuple(rules)


def rule(blocks: Sequence[str], ports: Sequence[int]) -> dict[str, Any]:
    """Return a rule of a NetworkPolicy that opens TCP ports of some networks."""
    return {
        "to": [{"ipBlock": {"cidr": block}} for block in blocks],
        "ports": [{"port": port, "protocol": "TCP"} for port in ports],
    }


class Flavor(StrEnum):
    """Kind of object that holds the pods."""

    JOB = "job"
    JOBSET = "jobset"
    TRAINJOB = "trainjob"
    PYTORCHJOB = "pytorchjob"
    KUEUE = "kueue"


class Spot(StrEnum):
    """Provider of the spot nodes; ``none`` for other nodes."""

    NONE = "none"
    AWS = "aws"
    GKE = "gke"
    AKS = "aks"


_GRACE_SECONDS = 25.0
_NOTICE = {Spot.AWS: "aws", Spot.GKE: "gke", Spot.AKS: "azure"}
# A name must be short: pods add a number, and a Job of another flavor adds the name of its part.
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")
KUBERNETES_VARIABLES = ("POD_NAME", "POD_NAMESPACE", "NODE_NAME", "RUN_ID")
"""Variables whose values Kubernetes sets in each pod."""
# Grammar of image references, from github.com/distribution/reference.
_IMAGE = re.compile(
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]+)?/)?"
    r"[a-z0-9]+(?:(?:[._]|__|-+|/)[a-z0-9]+)*"
    r"(?::\w[\w.-]{0,127})?(?:@sha256:[0-9a-f]{64})?",
    re.ASCII,
)
_PODS = re.compile(r"([1-9][0-9]{0,4})(?::([1-9][0-9]{0,4}))?")
_QUANTITIES = {
    "--cpu": (re.compile(r"[1-9][0-9]*(\.[0-9]+)?|0\.[0-9]+|[1-9][0-9]*m"), "8, 0.5 or 500m"),
    "--memory": (re.compile(r"[1-9][0-9]*[KMGT]i?"), "a size such as 64Gi"),
    "--shm": (re.compile(r"[1-9][0-9]*[KMGT]i?"), "a size such as 16Gi"),
    "--disk": (re.compile(r"[1-9][0-9]*[KMGT]i?"), "a size such as 10Gi"),
}
_RENDEZVOUS_REASON = "the manifests set the rendezvous; use `k8s --pods MIN:MAX`"
_REFUSED_OPTIONS = {
    **dict.fromkeys(RENDEZVOUS_OPTIONS, _RENDEZVOUS_REASON),
    "metrics_port": "the probe of the pods uses port 9464",
    "metrics_host": "the probe of the pods comes from outside",
    "storage_options": "everyone who can read the Job would see them; use --secret",
    "dry_run": "it has no meaning in a cluster",
    "requeue_exit_code": "the manifests decide what follows 75",
}


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of a pod; requests equal limits, and shared memory is part of the memory."""

    cpu: str = "4"
    memory: str = "16Gi"
    shm: str = "4Gi"
    disk: str = "10Gi"
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class PodTimes:
    """Seconds until the workers are killed, until the pod is killed, and until the run ends."""

    grace: float = _GRACE_SECONDS
    termination: int = 30
    deadline: int = 604800


@dataclass(frozen=True, slots=True)
class KubeRun:
    """Checked specification of a run on Kubernetes.

    Attributes:
        name: Name of all objects.
        image: Image of the container.
        command: Words after ``resilient train``.
        pods_min: Fewest pods that train.
        pods_max: Requested pods.
        namespace: Namespace; empty for the default of the user who applies the manifests.
        resources: Resources of each pod.
        times: Time limits.
        spot: Provider of the spot nodes.
        failures_max: Largest number of failed starts; preemptions do not count.
        environment: Names and values of variables.
        secrets: Names of Secrets whose entries become variables.
        claim: PersistentVolumeClaim that is mounted at ``/checkpoints``.
        queue: Queue of Kueue.
        given: Options of ``train`` that the command itself contains.
        identity: Cloud identity of the pods.
        egress: Networks and ports that pods may reach, besides port 443 everywhere.
    """

    name: str
    image: str
    command: tuple[str, ...]
    pods_min: int = 1
    pods_max: int = 1
    namespace: str = ""
    resources: Resources = Resources()
    times: PodTimes = PodTimes()
    spot: Spot = Spot.NONE
    failures_max: int = 6
    environment: tuple[tuple[str, str], ...] = ()
    secrets: tuple[str, ...] = ()
    claim: str = ""
    queue: str = ""
    given: frozenset[str] = frozenset()
    identity: Identity = NO_IDENTITY
    egress: tuple[tuple[str, int], ...] = ()


def check_names(name_by_option: Mapping[str, str]) -> None:
    """Check names of objects against the rules of an API server; empty names are skipped.

    Raises:
        ConfigError: A name is invalid; the message names its option.
    """
    for option, text in name_by_option.items():
        pattern = _NAME if option == "--name" else _SUBDOMAIN
        if text and not pattern.fullmatch(text):
            length = 40 if option == "--name" else 253
            raise ConfigError(
                f"{option} {text!r} is not 1 to {length} of a-z, 0-9 and -, a letter first"
            )


def check_image(image: str) -> None:
    """Check the reference of an image.

    Raises:
        ConfigError: No registry can have such an image.
    """
    if not _IMAGE.fullmatch(image):
        image_text = image.rpartition("@")[2] if has_credentials(f"://{image}") else image
        raise ConfigError(
            f"--image {image_text!r} is not an image: [HOST[:PORT]/]NAME[:TAG][@sha256:DIGEST], "
            "with a NAME of a-z and 0-9 and a digest of 64 hex digits, as `docker push` prints it",
            hint="docker images --digests",
        )


def check_resources(resources: Resources) -> None:
    """Check that quantities have the notation of Kubernetes.

    Raises:
        ConfigError: A quantity is invalid, or shared memory takes all of the memory.
    """
    texts = {
        "--cpu": resources.cpu,
        "--memory": resources.memory,
        "--shm": resources.shm,
        "--disk": resources.disk,
    }
    for option, text in texts.items():
        pattern, syntax = _QUANTITIES[option]
        if not pattern.fullmatch(text):
            raise ConfigError(f"{option} {text!r} is not {syntax}")
    if _parse_bytes(resources.shm) >= _parse_bytes(resources.memory):
        raise ConfigError(
            f"--shm {resources.shm} is part of --memory {resources.memory}, and leaves no other "
            "memory"
        )


def parse_pods(text: str) -> tuple[int, int]:
    """Parse ``N`` or ``MIN:MAX``, and return the fewest and the most pods.

    Raises:
        ConfigError: The text is neither, or MAX is less than MIN.
    """
    match = _PODS.fullmatch(text)
    if not match:
        raise ConfigError(f"--pods {text!r} is not N or MIN:MAX")
    pods_min, pods_max = int(match[1]), int(match[2] or match[1])
    if pods_max < pods_min:
        raise ConfigError(f"--pods {text!r}: at most {pods_max} is less than at least {pods_min}")
    return pods_min, pods_max


def parse_environment(texts: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Parse ``NAME=VALUE`` entries; a manifest is no place for secrets.

    Raises:
        ConfigError: A name is invalid, reserved or repeated, has no value, or is that of a secret.
    """
    variables: dict[str, str] = {}
    for text in texts:
        name, has_value, value = text.partition("=")
        if not is_variable(name) or not has_value:
            raise ConfigError(f"--env {name!r} is not NAME=VALUE")
        if name in variables or name in KUBERNETES_VARIABLES:
            raise ConfigError(f"--env {name} is given twice, or is set by Kubernetes")
        if is_secret(name, value):
            raise ConfigError(
                f"--env {name}: everyone who can read the Job would see its value",
                hint=f"kubectl create secret generic NAME --from-literal={name}=...",
            )
        variables[name] = value
    return tuple(variables.items())


def check_command(command: tuple[str, ...], option_names: Iterable[str]) -> None:
    """Refuse options that the manifests set, and secrets that the Job would show.

    Args:
        command: Words after ``train``.
        option_names: Names of the options of ``train`` among them.

    Raises:
        ConfigError: An option is refused; the message names its replacement.
    """
    refuse_system_options(set(option_names), _REFUSED_OPTIONS)
    for word in command:
        if has_credentials(word):
            raise ConfigError(
                "a URL of the command has a user, a password or a signature, and the Job would "
                "show it: set RESILIENT_STORAGE_OPTIONS with --secret NAME",
                hint="kubectl create secret generic NAME "
                "--from-literal=RESILIENT_STORAGE_OPTIONS=...",
            )
    if option := secret_option(command):
        raise ConfigError(
            f"{option}: everyone who can read the Job would see its value. Read a variable in the "
            "script, and set it with --secret NAME",
            hint="kubectl create secret generic NAME --from-literal=VARIABLE=...",
        )


def fit_times(
    grace_seconds: float | None,
    took: preemption_budget.SaveTimes,
    spot: Spot,
    deadline_seconds: int,
) -> PodTimes:
    """Return a grace that a save fits into, and a grace of the pod that fits into the notice.

    Args:
        grace_seconds: ``--grace`` of the command, in seconds; None if it has none.
        took: Durations of saves and promotions, if they are known.
        spot: Provider whose notice applies.
        deadline_seconds: Deadline of the run.

    Raises:
        ConfigError: A save does not fit; the message has the numbers.
    """
    notice = preemption_budget.NOTICE_SECONDS[_NOTICE[spot]] if spot in _NOTICE else None
    available_seconds = (
        _GRACE_SECONDS
        if notice is None
        else min(_GRACE_SECONDS, notice - preemption_budget.MARGIN_SECONDS)
    )
    grace = (
        max(available_seconds, preemption_budget.needed_grace(took))
        if grace_seconds is None
        else grace_seconds
    )
    termination = math.ceil(grace + preemption_budget.MARGIN_SECONDS)
    preemption_budget.require(preemption_budget.budget_of(took, grace, float(termination), notice))
    return PodTimes(grace, termination, deadline_seconds)


def _parse_bytes(text: str) -> float:
    number, unit, binary = re.fullmatch(r"(\d+)([KMGT])(i?)", text).groups()  # type: ignore[union-attr]
    return float(int(number) * (1024 if binary else 1000) ** ("KMGT".index(unit) + 1))
