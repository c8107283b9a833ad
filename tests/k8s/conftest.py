"""Manifests as kustomize builds them, once for all tests."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import yaml

from tests.services import kustomize
from tests.services.presence import require

K8S = Path(__file__).resolve().parents[2] / "k8s"
KINDS = {path.parent: path.read_text() for path in sorted(K8S.rglob("kustomization.yaml"))}
FOLDERS = [path for path, text in KINDS.items() if "kind: Component" not in text]
COMPONENTS = [path for path, text in KINDS.items() if "kind: Component" in text]


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """Return what each folder of k8s/ builds, as text; a component over the base."""
    require("kustomize", kustomize.why_impossible())
    folder = tmp_path_factory.mktemp("components")
    over = {path: _over_base(folder / path.name, path) for path in COMPONENTS}
    made = kustomize.build([*FOLDERS, *over.values()])
    return {path: made[over.get(path, path)] for path in KINDS}


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


def _over_base(folder, component):
    folder.mkdir()
    base, path = (os.path.relpath(one, folder) for one in (K8S / "base", component))
    text = {"resources": [base], "components": [path]}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(text))
    return folder
