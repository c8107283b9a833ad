"""Plans of faults: what TOML may say, what a seed makes of it, what is refused before it starts."""

from __future__ import annotations

import pytest

from resilient.errors import ConfigError
from resilient.testing.chaos.capabilities import MachineCapabilities, require_capabilities, why_not
from resilient.testing.chaos.plan import (
    FaultKind,
    PlannedFault,
    Target,
    draw_injections,
    parse_plan,
    read_plan,
    shipped,
)

TWO = """
description = "two kinds"

[[fault]]
kind = "kill"
target = "job"
during = "save"
at = [0.5, 0.8]
count = 3

[[fault]]
kind = "stop"
seconds = 2
at = 0.25
"""


def test_a_plan_says_what_strikes_whom_when_and_for_how_long():
    plan = parse_plan(TWO, "two")
    assert (plan.name, plan.description) == ("two", "two kinds")
    assert plan.faults == (
        PlannedFault(FaultKind.KILL, Target.JOB, in_save=True, at=(0.5, 0.8), count=3),
        PlannedFault(FaultKind.STOP, at=(0.25, 0.25), seconds=2.0),
    )


@pytest.mark.parametrize(
    ("entry", "said", "hint"),
    [
        ('kind = "kil"', "`kind` is 'kil'", "kill"),
        ("count = 1", "`kind` is missing", "kill"),
        ('kind = "kill"\ntarget = "disk"', "`target` is 'disk'", "rank, agent, host, job"),
        ('kind = "kill"\nseconds = 3', "`seconds` is unknown", "known: kind"),
        ('kind = "cut"\ntarget = "host"', "`target` is unknown", "known: kind"),
        ('kind = "kill"\ntargets = "job"', "`targets` is unknown", "did you mean `target`?"),
        ('kind = "preempt"\nseconds = 3', "`seconds` is unknown", "known: kind"),
        ('kind = "stop"\ntarget = "rank"', "`target` is unknown", "known: kind"),
        ('kind = "kill"\nat = [0.5, 0.2]', "`at` is [0.5, 0.2]", "shares of the run"),
        ('kind = "kill"\nat = [0.5, 1.2]', "`at` is [0.5, 1.2]", "shares of the run"),
        ('kind = "kill"\ncount = 0', "`count` is 0", "from 1 to 100"),
        ('kind = "kill"\ncount = true', "`count` is True", "from 1 to 100"),
        ('kind = "stop"\nseconds = -1', "`seconds` is -1", "5.0"),
        ('kind = "stop"\nseconds = nan', "`seconds` is nan", "5.0"),
    ],
)
def test_what_no_plan_can_say_is_refused_by_its_place(entry, said, hint):
    with pytest.raises(ConfigError) as refused:
        parse_plan(f"[[fault]]\n{entry}\n", "odd")
    assert "fault 1 of plan `odd`" in refused.value.message
    assert said in refused.value.message
    assert hint in refused.value.hint


@pytest.mark.parametrize("text", ["fault = 3", "[fault]\nkind = 'kill'", "= 3", "faults = []"])
def test_what_is_no_plan_at_all_is_refused(text):
    with pytest.raises(ConfigError, match="plan `odd`"):
        parse_plan(text, "odd")


def test_a_plan_is_shipped_or_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(TWO, encoding="utf-8")
    assert read_plan(str(path)).name == "mine"
    assert read_plan("kills").has(FaultKind.KILL)
    with pytest.raises(ConfigError, match="no plan `kils`: there are calm"):
        read_plan("kils")
    with pytest.raises(ConfigError, match="no plan"):
        read_plan(str(tmp_path / "other.toml"))


def test_every_shipped_plan_can_be_read_and_says_what_it_is_for():
    plans = shipped()
    assert {"calm", "clock", "kills", "preemptions", "damage", "storage", "mixed"} <= {
        one.name for one in plans
    }
    assert all(one.description for one in plans)


def test_the_same_seed_strikes_the_same_and_another_one_does_not():
    plan = parse_plan(TWO, "two")
    assert draw_injections(plan, 7) == draw_injections(plan, 7)
    assert draw_injections(plan, 7) != draw_injections(plan, 8)


def test_strikes_come_in_the_order_of_the_run_and_inside_their_windows():
    strikes = draw_injections(parse_plan(TWO, "two"), 7)
    assert [one.fault.kind for one in strikes] == [FaultKind.STOP, *[FaultKind.KILL] * 3]
    assert all(one.fault.at[0] <= one.share <= one.fault.at[1] for one in strikes)
    assert len({one.share for one in strikes}) == 4
    assert [one.share for one in strikes] == sorted(one.share for one in strikes)


def test_an_entry_more_moves_none_of_the_others():
    more = parse_plan(TWO + '[[fault]]\nkind = "preempt"\n', "more")
    assert set(draw_injections(parse_plan(TWO, "two"), 7)) < set(draw_injections(more, 7))


def test_a_strike_comes_before_the_last_step_and_at_a_rank_that_is_there():
    for strike in draw_injections(parse_plan('[[fault]]\nkind = "kill"\ncount = 100\n', "many"), 1):
        assert 1 <= strike.step(10) <= 9
        assert strike.step(1) == 1
        assert strike.rank(3) in range(3)
        assert strike.rank(1) == 0


def of(*kinds):
    return parse_plan("\n".join(f'[[fault]]\nkind = "{one}"' for one in kinds), "some")


HOSTS = """
[[fault]]
kind = "cut"

[[fault]]
kind = "kill"
target = "host"
seconds = 3

[[fault]]
kind = "kill"
target = "agent"
"""


def test_a_host_is_cut_off_or_away_for_a_time():
    cut, lost, agent = parse_plan(HOSTS, "hosts").faults
    assert (cut.seconds, lost.seconds, agent.seconds) == (30.0, 3.0, 0.0)
    assert [one.needs_hosts for one in (cut, lost, agent)] == [True, True, False]
    assert [one.is_of_host for one in (cut, lost, agent)] == [True] * 3
    assert not any(one.is_of_host for one in of("kill", "preempt", "stop", "bit_flip").faults)
    assert parse_plan('[[fault]]\nkind = "kill"\ntarget = "host"', "x").faults[0].seconds == 10.0


def test_a_seed_draws_the_host():
    plan = parse_plan('[[fault]]\nkind = "cut"\ncount = 100\n', "many")
    drawn = [one.host(3) for one in draw_injections(plan, 1)]
    assert set(drawn) == {0, 1, 2}
    assert drawn == [one.host(3) for one in draw_injections(plan, 1)]


def test_what_cannot_be_done_here_is_refused_with_all_reasons():
    machine = MachineCapabilities(
        mounting="only root may", tracing="no strace", moving="no compiler"
    )
    asked = of("kill", "disk_full", "storage_error", "clock_skew", "cut")
    with pytest.raises(ConfigError) as refused:
        require_capabilities(asked, {"repo": "x"}, machine)
    message = refused.value.message
    assert "`disk_full`: only root may" in message
    assert "`storage_error`: no strace" in message
    assert "`clock_skew`: no compiler" in message
    assert "`cut`: it applies to one of several hosts: chaos run --hosts 2" in message
    assert "--repo: each of the two runs" in message
    assert "`kill`" not in message
    assert "stop" not in message


def test_what_the_plan_does_not_ask_for_is_no_reason():
    machine = MachineCapabilities(mounting="only root may", tracing="no strace", hosts="no ip")
    require_capabilities(of("kill", "notice"), {"max_restarts": 1}, machine)
    with pytest.raises(ConfigError, match="its own --notice"):
        require_capabilities(of("notice"), {"notice": "aws"}, machine)
    with pytest.raises(ConfigError, match="needs /proc"):
        require_capabilities(of("kill"), {}, MachineCapabilities(processes="it needs /proc"))
    assert why_not(of("kill", "cut"), machine) == {"cut": "no ip"}


def test_hosts_that_cannot_be_are_refused():
    plan = parse_plan(HOSTS, "hosts")
    require_capabilities(plan, {"nnodes": "1:2"}, MachineCapabilities(), hosts=2)
    require_capabilities(of("stop"), {"nnodes": "3"}, MachineCapabilities(), hosts=3)
    with pytest.raises(ConfigError, match="`kill of a host`: it applies to one of several hosts"):
        require_capabilities(plan, {}, MachineCapabilities())
    with pytest.raises(ConfigError, match="--hosts 2: only root may"):
        require_capabilities(of("stop"), {}, MachineCapabilities(hosts="only root may"), hosts=2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nnodes": "1:2"}, "--nnodes 1:2: there are 3 hosts"),
        ({"nnodes": "4"}, "--nnodes 4: there are 3 hosts"),
        ({"rdzv_endpoint": "a:1"}, "--rdzv-endpoint: chaos sets the rendezvous of its hosts"),
        ({"standalone": True}, "--standalone: chaos sets"),
        ({"local_addr": "a"}, "--local-addr: chaos sets"),
    ],
)
def test_a_command_that_says_otherwise_how_hosts_meet_is_refused(given, said):
    with pytest.raises(ConfigError) as refused:
        require_capabilities(of("kill"), given, MachineCapabilities(), hosts=3)
    assert said in refused.value.message
