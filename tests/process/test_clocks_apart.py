"""Hosts whose clocks are apart, or jump while they train: nobody is taken for silent."""

from __future__ import annotations

import pytest

from resilient.testing.chaos.clock_shift import MovableClock, why_not_moving

HOUR = 3600.0
STEPS = 24

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(why_not_moving()), reason=why_not_moving()),
]


@pytest.mark.parametrize("seconds", [HOUR, -HOUR], ids=["fast", "slow"])
def test_a_host_whose_clock_is_apart_trains_with_the_others(
    seconds, network, on_host, tmp_path, monkeypatch
):
    hosts = network(2)
    first = on_host(hosts, 0, tmp_path, "1:2", "--grace", "5", max_steps=STEPS, pause=0.4)
    clock = MovableClock(tmp_path)
    with monkeypatch.context() as only:
        for name, value in clock.environ.items():
            only.setenv(name, value)
        second = on_host(hosts, 1, tmp_path, "1:2", "--grace", "5", max_steps=STEPS, pause=0.4)
    second.wait_for_world(2)
    first.wait_for_steps(3)
    clock.move(seconds)
    assert [first.end(), second.end()] == [0, 0], first.said + second.said
    assert first.worlds()[-1] == second.worlds()[-1] == 2
    assert len(second.worlds()) == 1, second.said
    assert first.told("NodesLost") == second.told("NodesLost") == []
