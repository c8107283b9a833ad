"""What the pods of a run may reach besides each other, and who they are there."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

PORT_MAX = 65535
_ANNOTATIONS = {
    "irsa": "eks.amazonaws.com/role-arn",
    "gke": "iam.gke.io/gcp-service-account",
    "azure": "azure.workload.identity/client-id",
}
_HAND_OUT = {
    "eks": (("169.254.170.23/32",), (80,)),
    "gke": (("169.254.169.252/32", "169.254.169.254/32"), (80, 988)),
}
"""Where credentials come from, if not from a file that a webhook mounts."""
_KINDS = "eks, irsa=ROLE_ARN, gke=SERVICE_ACCOUNT or azure=CLIENT_ID"


@dataclass(frozen=True, slots=True)
class Identity:
    """Who the pods are for the cloud; nobody by default.

    Attributes:
        kind: ``eks`` (Pod Identity), ``irsa``, ``gke``, ``azure`` (Workload ID), or empty.
        value: the role, service account or client; Pod Identity associates it by itself.
    """

    kind: str = ""
    value: str = ""

    @property
    def annotations(self) -> dict[str, str]:
        """What the ServiceAccount says."""
        return {_ANNOTATIONS[self.kind]: self.value} if self.value else {}

    @property
    def labels(self) -> dict[str, str]:
        """What the pods say besides."""
        return {"azure.workload.identity/use": "true"} if self.kind == "azure" else {}

    @property
    def egress(self) -> list[dict[str, Any]]:
        """The rules by which they reach what hands out credentials."""
        blocks, ports = _HAND_OUT.get(self.kind, ((), ()))
        return [rule(blocks, ports)] if blocks else []


NOBODY = Identity()


def parse_identity(text: str) -> Identity:
    """Return the identity that ``--identity`` names.

    Raises:
        ConfigError: there is none of that kind, or it misses its name.
    """
    kind, _, value = text.partition("=")
    if text and (kind not in {"eks", *_ANNOTATIONS} or (kind == "eks") is bool(value)):
        raise ConfigError(f"--identity {text!r} is not {_KINDS}")
    if any(not one.isprintable() or one.isspace() for one in value):
        raise ConfigError(f"--identity {text!r}: a name has no blanks")
    return Identity(kind, value)


def parse_egress(given: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Return the networks and ports of ``--egress CIDR:PORT``.

    Raises:
        ConfigError: one is neither.
    """
    found = []
    for text in given:
        network, _, port = text.rpartition(":")
        if not port.isdecimal() or not 0 < int(port) <= PORT_MAX:
            raise ConfigError(f"--egress {text!r} is not CIDR:PORT: 10.0.0.0/8:9000")
        try:
            found.append((str(ipaddress.ip_network(network)), int(port)))
        except ValueError as error:
            raise ConfigError(
                f"--egress {text!r}: {error}; it is CIDR:PORT, as 10.0.0.0/8:9000"
            ) from error
    return tuple(found)


def rule(blocks: Sequence[str], ports: Sequence[int]) -> dict[str, Any]:
    """Return the rule of a NetworkPolicy that opens TCP ports of some networks."""
    return {
        "to": [{"ipBlock": {"cidr": one}} for one in blocks],
        "ports": [{"port": one, "protocol": "TCP"} for one in ports],
    }
