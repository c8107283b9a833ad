"""A save of many ranks costs each of them, and the way to the commit, what it costs few."""

from __future__ import annotations

import pytest

from benchmarks.scale import SIZES, run, save_twice, table

FEW, MANY = 4, 24


@pytest.fixture(scope="module")
def found():
    return {size: save_twice(size) for size in (FEW, MANY)}


def test_a_rank_puts_its_two_files_and_asks_the_store_nothing(found):
    assert found[MANY]["store_requests_per_rank"] == 2
    assert found[MANY]["messages_per_rank"] == found[FEW]["messages_per_rank"]


def test_the_coordinator_reads_what_all_have_shown_in_one_call(found):
    shown = {size: one["coordinator_messages"] for size, one in found.items()}
    assert shown[MANY]["multi_get"] == shown[FEW]["multi_get"] == 2
    assert "get" not in shown[MANY]


def test_the_way_to_the_commit_is_as_long_for_many_as_for_few(found):
    assert found[MANY]["path_to_commit_calls"] == found[FEW]["path_to_commit_calls"]
    assert found[MANY]["coordinator_messages"] == found[FEW]["coordinator_messages"]


def test_the_coordinator_asks_the_store_no_more_for_many_but_to_let_files_go(found):
    asked = {size: one["coordinator_store_requests"] for size, one in found.items()}
    assert asked[MANY].pop("delete") == 2 * MANY + 2
    assert asked[FEW].pop("delete") == 2 * FEW + 2
    assert asked[MANY] == asked[FEW]
    # The manifest, and the three files of the coordinator's own.
    assert asked[MANY]["put_new"] == 4


def test_a_manifest_grows_with_the_ranks_and_not_faster(found):
    assert found[MANY]["manifest_bytes"] < found[FEW]["manifest_bytes"] * MANY / FEW


def test_the_table_has_a_column_for_each_number_of_ranks():
    report = run(1, (1, 2))
    assert report.ratios["store_requests_per_rank_over_2"] == 1
    assert "| ranks | 1 | 2 |" in table(report)
    assert SIZES[-1] == 16384
