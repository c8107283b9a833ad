"""What a command asks of the storage: a repository of ours does not pay for runs of others."""

from __future__ import annotations

from collections import Counter

import pytest

from resilient.storage.local import LocalStore
from tests.helpers.cli_repositories import write_usual_run


@pytest.fixture
def asked(monkeypatch):
    """Count the listings that the stores of a test are asked for, by prefix."""
    found: Counter[str] = Counter()
    listed = LocalStore.list

    def counted(store, prefix=""):
        found[prefix] += 1
        return listed(store, prefix)

    monkeypatch.setattr(LocalStore, "list", counted)
    return found


@pytest.mark.parametrize(
    ("words", "listings"),
    [(("inspect",), 2), (("verify",), 6), (("repair",), 3), (("diff", "latest~1"), 4)],
)
def test_a_reference_into_our_own_repository_costs_no_look_for_others(
    tmp_path, call, asked, words, listings
):
    write_usual_run(tmp_path / "run")
    asked.clear()
    command, *more = words
    assert call("ckpt", command, *more, "latest", "-r", tmp_path / "run").status in (0, 1)
    assert asked["checkpoint-"] == listings, asked
