"""The answer of ``k8s render``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient_cli.kubernetes.text import to_yaml
from resilient_cli.render import Answer

if TYPE_CHECKING:
    from resilient_cli.kubernetes.run import Flavor, KubeRun


def rendered(run: KubeRun, flavor: Flavor, made: list[dict[str, Any]]) -> Answer:
    """Return the manifests: as YAML for people and kubectl, as objects for programs."""
    document = {
        "flavor": flavor.value,
        "grace_seconds": run.times.grace,
        "termination_seconds": run.times.termination,
        "manifests": made,
    }
    ids = tuple(f"{one['kind'].lower()}/{one['metadata']['name']}" for one in made)
    text = to_yaml(made)
    return Answer("k8s.render", "manifests", document, (text.rstrip("\n"),), ids, is_verbatim=True)
