"""Saved in any layout by any number of ranks, loaded in any other: equal to the bit."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.process.gangs import finish, gang_of
from tests.process.reshard_worker import LAYOUTS, SAVERS

WORKER = Path(__file__).with_name("reshard_worker.py")
pytestmark = [
    pytest.mark.timeout(600),
    # All tests read what one gang of each size found.
    pytest.mark.xdist_group("resharding"),
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """What differs, for each (rank, what saved, what loaded); every world is started once."""
    folder = tmp_path_factory.mktemp("worlds")
    found = {}
    with ExitStack() as stack:
        gangs = {size: stack.enter_context(gang_of(size, WORKER, folder)) for size in (1, 2)}
        wait_for(gangs, "saved")
        later = {size: stack.enter_context(gang_of(size, WORKER, folder)) for size in (3, 4)}
        wait_for(later, "saved")
        for size, gang in (gangs | later).items():
            (folder / f"go-{size}").touch()
            ends = finish(gang, within_seconds=300)
            assert [status for status, _, _ in ends] == [0] * size, ends
            for rank, (_, said, _) in enumerate(ends):
                for saver, loader, wrong in map(json.loads, said.splitlines()[:-1]):
                    found[rank, saver, loader] = wrong
    return found


def wait_for(gangs, word):
    for gang in gangs.values():
        for process in gang:
            line = process.stdout.readline()
            assert line.strip() == word, process.stderr.read()[-3000:]


@pytest.mark.parametrize("loader", SAVERS)
@pytest.mark.parametrize("saver", SAVERS)
def test_every_pair_of_layouts_agrees_to_the_bit(loaded, saver, loader):
    ranks = int(loader.rpartition("-")[2])
    assert loader.rpartition("-")[0] in LAYOUTS[ranks]
    assert [loaded[rank, saver, loader] for rank in range(ranks)] == [[]] * ranks
