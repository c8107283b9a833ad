"""What the lives of a run cost, and every reaction to what they leave."""

import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.elastic.outcome import Cause, Outcome, OutcomeKind
from resilient.elastic.restart_policy import (
    PERMANENT_CODES,
    FailureHistory,
    FailureLimits,
    Finish,
    GiveUp,
    LeaveHost,
    Restart,
    RestartBudget,
    decide,
    reaction_table,
)

FAILED = Outcome(OutcomeKind.FAILED, 1, cause=Cause.EXIT)
ECHO = Outcome(OutcomeKind.FAILED, 69, is_echo=True, cause=Cause.PEER)
LOST = Outcome(OutcomeKind.REGROUPED, 1, is_echo=True, cause=Cause.PEER)
HUNG = Outcome(OutcomeKind.FAILED, 69, cause=Cause.HANG)
LIMITS = FailureLimits(restarts_max=3, window_seconds=100.0)


def lived(*outcomes, progressed=True, every=1.0):
    history = FailureHistory()
    for number, outcome in enumerate(outcomes):
        history = history.after(outcome, number * every, progressed=progressed)
    return history


def test_failures_are_counted_in_a_window_of_time():
    history = lived(*[FAILED] * 4, every=60.0)
    assert history.budget(LIMITS, 180.0).restarts_left == 2
    assert history.budget(replace(LIMITS, window_seconds=0.0), 180.0).restarts_left == 0
    assert lived(*[FAILED] * 4).budget(LIMITS, 4.0).restarts_left == 0


def test_the_first_failure_has_all_restarts_to_spend():
    history = lived(FAILED)
    assert history.budget(LIMITS, 0.0).restarts_left == 3
    assert decide(FAILED, history.budget(LIMITS, 0.0)) == Restart("failure", is_paid=True)


def test_a_life_of_unknown_progress_counts_neither_way():
    history = lived(FAILED, FAILED, progressed=False)
    history = history.after(FAILED, 2.0, progressed=None)
    assert history.no_progress_lives == 2
    assert history.after(FAILED, 3.0, progressed=False).no_progress_lives == 3
    assert history.after(FAILED, 3.0, progressed=True).no_progress_lives == 0


def test_a_life_that_trained_and_was_ended_from_outside_is_no_life_of_a_crash_loop():
    robbed = Outcome(OutcomeKind.FAILED, -9, cause=Cause.SIGNAL, has_stepped=True)
    loop = lived(FAILED, FAILED, robbed, robbed, progressed=False)
    assert loop.no_progress_lives == 2
    assert lived(FAILED, robbed, progressed=True).no_progress_lives == 0
    budget = RestartBudget(no_progress_lives=3)
    assert decide(robbed, budget) == Restart("failure", is_paid=True), "and it waits for nothing"
    for other in (
        replace(robbed, has_stepped=False),
        replace(robbed, cause=Cause.OOM_KILL),
        replace(robbed, cause=None),
        replace(robbed, status=-11),
    ):
        assert decide(other, budget).code == 70
        assert lived(other, progressed=False).no_progress_lives == 1
    assert decide(robbed, replace(budget, restarts_left=0)).code == 137, "restarts bound it"


def test_the_number_of_lives_without_progress_can_be_chosen():
    history = lived(*[FAILED] * 4, progressed=False)
    for most, is_over in ((4, True), (5, False), (0, False)):
        limits = replace(LIMITS, restarts_max=9, no_progress_lives_max=most)
        assert isinstance(decide(FAILED, history.budget(limits, 4.0)), GiveUp) == is_over


def test_a_host_counts_its_own_failures_only():
    assert lived(FAILED, ECHO, FAILED).budget(LIMITS, 3.0).host_failures == 2


def test_ranks_of_other_hosts_that_are_lost_cost_nothing_while_there_is_progress():
    history = lived(*[LOST] * 50)
    budget = history.budget(replace(LIMITS, restarts_max=0), 50.0)
    assert (history.failures, history.host_failures, history.preemptions) == ((), (), 0)
    assert (budget.restarts_left, budget.host_failures) == (0, 0)
    assert decide(LOST, budget) == Restart("failure", is_paid=False)


def test_lives_that_only_lose_others_and_commit_nothing_are_a_crash_loop():
    again, last = (lived(*[LOST] * lives, progressed=False) for lives in (2, 3))
    assert decide(LOST, again.budget(LIMITS, 2.0)).delay_seconds > 0
    assert decide(LOST, last.budget(LIMITS, 3.0)).code == 70
    assert lived(LOST, LOST, FAILED, progressed=False).no_progress_lives == 3


def test_where_nothing_tells_of_progress_losses_of_others_are_counted_until_they_are_explained():
    limits = replace(LIMITS, restarts_max=4)
    # One more than who fails by itself may be started again: that one says how the run ends.
    history = lived(*[LOST] * 5, progressed=None)
    assert decide(LOST, history.budget(limits, 5.0)) == Restart("failure", is_paid=False)
    history = history.after(LOST, 6.0, progressed=None)
    assert decide(LOST, history.budget(limits, 6.0)).code == 69
    assert history.budget(limits, 500.0).losses_left == 5
    assert history.after(LOST, 7.0, progressed=True).losses == ()
    assert lived(LOST, progressed=None).budget(replace(LIMITS, restarts_max=0), 1.0).losses_left > 0


def test_losses_of_others_are_counted_where_no_crash_loop_is_wanted():
    limits = replace(LIMITS, restarts_max=3, no_progress_lives_max=0)
    history = lived(*[LOST] * 4, progressed=False)
    assert isinstance(decide(LOST, history.budget(limits, 4.0)), Restart)
    assert decide(LOST, history.after(LOST, 5.0, progressed=False).budget(limits, 5.0)).code == 69


def test_interruptions_have_a_budget_of_their_own():
    history = lived(Outcome(OutcomeKind.PREEMPTED, 75), Outcome(OutcomeKind.REGROUPED))
    history = history.after(Outcome(OutcomeKind.REGROUPED, is_joined=True), 9.0, progressed=False)
    assert (history.preemptions, history.failures) == (2, ())
    most = FailureLimits(preemptions_max=2)
    assert history.budget(most, 9.0).preemptions_left == 0
    assert history.budget(FailureLimits(), 9.0).preemptions_left is None


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(OutcomeKind.PREEMPTED, 75),
        Outcome(OutcomeKind.REGROUPED),
        Outcome(OutcomeKind.STOPPED, 75, signal.SIGTERM),
        Outcome(OutcomeKind.STOPPED, -signal.SIGTERM, signal.SIGTERM),
    ],
)
def test_one_interruption_too_many_ends_the_run_with_143(outcome):
    assert not isinstance(decide(outcome, RestartBudget(preemptions_left=0)), GiveUp)
    action = decide(outcome, RestartBudget(preemptions_left=-1))
    assert isinstance(action, GiveUp)
    assert action.code == 143


def test_who_is_done_or_joined_was_not_interrupted():
    spent = RestartBudget(preemptions_left=-1)
    assert decide(Outcome(OutcomeKind.SUCCEEDED), spent) == Finish(0, "all workers are done")
    assert decide(Outcome(OutcomeKind.STOPPED, 0, signal.SIGTERM), spent).code == 0
    assert isinstance(decide(Outcome(OutcomeKind.REGROUPED, is_joined=True), spent), Restart)


def test_a_host_that_fails_too_often_is_left_out_if_the_others_can_go_on():
    worn = RestartBudget(host_failures=3, host_failures_max=3, may_leave=True)
    assert decide(FAILED, worn).code == 71
    assert isinstance(decide(FAILED, worn), LeaveHost)
    for other in (
        replace(worn, may_leave=False),
        replace(worn, host_failures=2),
        replace(worn, host_failures_max=0),
    ):
        assert isinstance(decide(FAILED, other), Restart)
    assert isinstance(decide(ECHO, worn), Restart)


def test_a_script_that_fails_on_every_host_alike_is_no_fault_of_each_of_them():
    worn = RestartBudget(host_failures=3, host_failures_max=3, may_leave=True, no_progress_lives=3)
    assert decide(FAILED, worn).code == 70
    assert decide(FAILED, replace(worn, no_progress_lives=2)).code == 71
    broken = Outcome(OutcomeKind.FAILED, 1, cause=Cause.GPU, is_host_broken=True)
    assert decide(broken, worn).code == 71


@pytest.mark.parametrize("cause", [Cause.GPU, Cause.HANG])
def test_a_broken_host_is_left_at_once(cause):
    action = decide(replace(HUNG, cause=cause, is_host_broken=True), RestartBudget(restarts_left=5))
    if cause is Cause.HANG:
        assert isinstance(action, LeaveHost)
    assert action.code in (69, 71)


def test_a_gpu_that_reported_a_fault_is_started_elsewhere():
    action = decide(
        Outcome(OutcomeKind.FAILED, 1, cause=Cause.GPU, is_host_broken=True), RestartBudget()
    )
    assert isinstance(action, LeaveHost)
    assert action.code == 71
    assert isinstance(
        decide(Outcome(OutcomeKind.FAILED, 1, cause=Cause.GPU), RestartBudget()), Restart
    )


def test_a_hang_is_tried_again_although_69_is_permanent():
    assert decide(HUNG, RestartBudget()) == Restart("hang", is_paid=True)
    assert decide(HUNG, RestartBudget(restarts_left=0)).code == 69


def test_with_progress_nobody_waits_and_without_it_longer_and_longer():
    delays = [
        decide(
            FAILED,
            RestartBudget(restarts_left=99, no_progress_lives=lives, no_progress_lives_max=99),
        )
        for lives in range(14)
    ]
    assert [one.delay_seconds for one in delays[:6]] == [0.0, 0.0, 1.0, 2.0, 4.0, 8.0]
    assert delays[-1].delay_seconds == 300.0


def test_a_wait_has_jitter_that_a_seed_repeats():
    history = lived(FAILED, FAILED, progressed=False)
    budgets = [history.budget(LIMITS, 2.0, seed=seed) for seed in "aab"]
    assert budgets[0] == budgets[1] != budgets[2]
    assert all(0.5 <= one.jitter <= 1.0 for one in budgets)
    assert decide(FAILED, budgets[0]).delay_seconds == budgets[0].jitter


outcomes = st.builds(
    Outcome,
    st.sampled_from(OutcomeKind),
    st.one_of(st.integers(-64, 255)),
    st.sampled_from([0, signal.SIGTERM, signal.SIGINT]),
    st.booleans(),
    st.just(""),
    st.one_of(st.none(), st.sampled_from(Cause)),
    st.booleans(),
    st.booleans(),
)
budgets = st.builds(
    RestartBudget,
    st.integers(-2, 5),
    st.integers(0, 6),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(-2, 3)),
    st.integers(0, 5),
    st.integers(0, 4),
    st.booleans(),
    st.floats(0.5, 1.0),
)


@given(outcomes, budgets)
def test_every_case_has_one_reaction_that_keeps_the_rules(outcome, budget):
    action = decide(outcome, budget)
    if isinstance(action, Restart):
        assert 0 <= action.delay_seconds <= 300
        assert action.is_paid == (outcome.kind is OutcomeKind.FAILED)
        assert outcome.kind in (OutcomeKind.FAILED, OutcomeKind.REGROUPED)
        if action.is_paid:
            assert budget.restarts_left > 0
            assert budget.no_progress_lives < budget.no_progress_lives_max
            assert budget.after(action).restarts_left == budget.restarts_left - 1
    else:
        assert 0 <= action.code <= 255
        assert action.reason
        # Nothing that failed is ever reported as done.
        assert action.code or (
            isinstance(action, Finish) and outcome.kind is not OutcomeKind.FAILED
        )
    if outcome.kind is OutcomeKind.SUCCEEDED:
        assert action.code == 0


@given(outcomes, budgets)
def test_a_restart_is_never_given_to_what_stays_broken(outcome, budget):
    permanent = outcome.status in PERMANENT_CODES and not outcome.is_echo
    if outcome.kind is OutcomeKind.FAILED and permanent and outcome.cause is not Cause.HANG:
        assert decide(outcome, budget).code == outcome.status


@given(st.lists(st.tuples(outcomes, st.booleans()), max_size=40))
def test_a_run_that_fails_on_and_on_ends(lives):
    """Whatever fails, within one window restarts that are paid are at most the budget's."""
    history, paid = FailureHistory(), 0
    for number, (outcome, progressed) in enumerate(lives):
        history = history.after(outcome, number * 0.1, progressed=progressed)
        action = decide(outcome, history.budget(LIMITS, number * 0.1))
        paid += isinstance(action, Restart) and action.is_paid
    assert paid <= LIMITS.restarts_max


def test_the_table_has_every_kind_and_every_reaction():
    rows = reaction_table()
    text = " ".join(row.follows for row in rows)
    for words in (
        "finish with 0",
        "save and exit with 75",
        "restart in place, one restart less",
        "restart in place, after a wait",
        "shrink and continue",
        "restart with the remaining nodes, free",
        "grow",
        "restart on another host: exit here with 71",
        *(f"give up with {code}" for code in (1, 69, 70, 78, 128 + 9, 143)),
    ):
        assert words in text, words
    ended = {row.ended for row in rows}
    assert {kind.value for kind in OutcomeKind} <= ended
    assert len({(row.ended, row.how) for row in rows}) == len(rows)
