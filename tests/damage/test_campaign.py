"""A slice of the damage campaign: the doors agree on damaged checkpoints.

``make campaign`` runs every case. ``--damage-seed`` selects the cases of this slice.
"""

from __future__ import annotations

import pytest

from tests.damage.campaign import CASES_MIN, Campaign, cases, kinds_for
from tests.damage.samples import SAMPLES
from tests.damage.sharded import ALL

EVERY = {"Trainer": 12, "ours": 25}
"""One case of so many is run here; of the other layouts one of :data:`REST`."""
REST = 80


@pytest.mark.filterwarnings("ignore")
def test_doors_asked_for_a_sample_of_damages_agree(request):
    seed = request.config.getoption("--damage-seed")
    print(f"repeat with --damage-seed {seed}")  # noqa: T201 - pytest shows it if the test fails
    campaign = Campaign(SAMPLES)
    found = [
        case
        for sample in SAMPLES
        for every in [EVERY.get(sample.name, REST)]
        for case in cases(campaign, [sample], every, seed % every, launch_every=0)
    ]
    campaign.close()
    assert {one.sample for one in found} >= set(EVERY)
    assert not [(one.name, one.faults) for one in found if one.faults]


def test_campaign_has_enough_damages_and_layouts():
    assert sum(len(kinds_for(one)) for one in ALL) >= CASES_MIN
