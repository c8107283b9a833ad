"""Manifests as kustomize builds them, once for all tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from tests.services import kustomize

K8S = Path(__file__).resolve().parents[2] / "k8s"
FOLDERS = sorted(
    path.parent
    for path in K8S.rglob("kustomization.yaml")
    if "kind: Component" not in path.read_text()
)


@pytest.fixture(scope="session")
def texts():
    """Return what each folder of k8s/ that stands alone builds, as text."""
    if problem := kustomize.why_impossible():
        pytest.skip(problem)
    return kustomize.build(FOLDERS)


@pytest.fixture(scope="session")
def built(texts):
    """Return the manifests of each folder, by its path below k8s/."""
    return {
        path.relative_to(K8S).as_posix(): list(yaml.load_all(text, yaml.CSafeLoader))
        for path, text in texts.items()
    }


@pytest.fixture(scope="session")
def kubectl():
    """Return the path of kubectl."""
    return shutil.which("kubectl") or pytest.skip("no kubectl on this machine")
