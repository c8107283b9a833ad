"""The checks find every broken manifest of a collection, and nothing in its good ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.helpers.manifest_rules import check_rules
from tests.helpers.manifest_schemas import check_schema

SAMPLES = Path(__file__).with_name("samples")
BAD = sorted((SAMPLES / "bad").glob("*.yaml"))
GOOD = sorted((SAMPLES / "good").glob("*.yaml"))


def problems(path):
    documents = [one for one in yaml.load_all(path.read_text(), yaml.CSafeLoader) if one]
    assert documents
    return [said for one in documents for said in (*check_schema(one), *check_rules(one))]


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_what_an_api_server_refuses_is_found(path):
    assert problems(path)


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_what_it_accepts_is_accepted(path):
    assert problems(path) == []
