"""The table of resilient.elastic.restart_policy, a test per row."""

import signal
from dataclasses import replace

import pytest

from resilient import errors
from resilient.elastic.outcome import ECHO_CODES, Cause, Outcome, OutcomeKind
from resilient.elastic.restart_policy import (
    PERMANENT_CODES,
    Finish,
    GiveUp,
    Restart,
    RestartBudget,
    decide,
    exit_code,
    name_command,
    name_of,
)

PLENTY = RestartBudget(restarts_left=5)
NONE_LEFT = RestartBudget(restarts_left=0)
KINDS = [
    one
    for one in vars(errors).values()
    if isinstance(one, type) and issubclass(one, errors.ResilientError)
]
LOOPING = RestartBudget(restarts_left=5, no_progress_lives=3)


def code_of(action):
    assert not isinstance(action, Restart)
    return action.code


@pytest.mark.parametrize("budget", [PLENTY, NONE_LEFT, LOOPING])
def test_a_group_that_succeeded_finishes_with_0(budget):
    assert decide(Outcome(OutcomeKind.SUCCEEDED), budget) == Finish(0, "all workers are done")


@pytest.mark.parametrize("budget", [PLENTY, NONE_LEFT, LOOPING])
def test_a_preempted_group_leaves_with_75_and_is_never_restarted(budget):
    action = decide(Outcome(OutcomeKind.PREEMPTED, status=75), budget)
    assert isinstance(action, Finish)
    assert action.code == 75


@pytest.mark.parametrize("code", sorted(PERMANENT_CODES))
def test_a_permanent_code_is_passed_on_without_a_restart(code):
    action = decide(Outcome(OutcomeKind.FAILED, status=code), PLENTY)
    assert isinstance(action, GiveUp)
    assert action.code == code


def test_the_permanent_codes_are_those_of_the_exit_code_table():
    assert {2, 3, 65, 66, 69, 70, 73, 77, 78, 80} == PERMANENT_CODES


@pytest.mark.parametrize("status", [1, 7, 71, 130, -9, -11, -6, -15])
def test_any_other_failure_is_restarted_for_one_restart(status):
    action = decide(Outcome(OutcomeKind.FAILED, status=status), PLENTY)
    assert action == Restart("failure", is_paid=True)
    assert PLENTY.after(action).restarts_left == 4


def test_the_echo_of_a_failure_elsewhere_is_restarted_although_69_is_permanent():
    outcome = Outcome(OutcomeKind.FAILED, status=69, is_echo=True)
    assert decide(outcome, PLENTY) == Restart("failure", is_paid=True)
    assert code_of(decide(outcome, NONE_LEFT)) == 69


@pytest.mark.parametrize(("status", "code"), [(7, 7), (1, 1), (-9, 137), (-15, 143), (71, 71)])
def test_without_restarts_the_workers_own_code_is_passed_on(status, code):
    action = decide(Outcome(OutcomeKind.FAILED, status=status), NONE_LEFT)
    assert isinstance(action, GiveUp)
    assert action.code == code


def test_lives_without_a_new_checkpoint_are_a_crash_loop():
    action = decide(Outcome(OutcomeKind.FAILED, status=-11), LOOPING)
    assert code_of(action) == 70
    assert "SIGSEGV" in action.reason
    assert "without a new checkpoint" in action.reason


def test_a_crash_loop_is_told_even_when_the_restarts_end_with_the_same_life():
    budget = RestartBudget(restarts_left=0, no_progress_lives=3)
    assert code_of(decide(Outcome(OutcomeKind.FAILED, status=1), budget)) == 70


def test_one_life_less_than_the_limit_is_no_crash_loop():
    budget = RestartBudget(restarts_left=1, no_progress_lives=2)
    assert isinstance(decide(Outcome(OutcomeKind.FAILED, status=1), budget), Restart)


def test_a_permanent_code_is_told_before_a_crash_loop():
    assert code_of(decide(Outcome(OutcomeKind.FAILED, status=78), LOOPING)) == 78


@pytest.mark.parametrize(("budget", "code"), [(PLENTY, 75), (NONE_LEFT, 1), (LOOPING, 70)])
def test_a_restart_that_a_stop_overtakes_is_left_to_the_requeue(budget, code):
    outcome = Outcome(OutcomeKind.FAILED, status=1, stop_signal=signal.SIGTERM)
    assert code_of(decide(outcome, budget)) == code


@pytest.mark.parametrize("budget", [PLENTY, NONE_LEFT, LOOPING])
def test_a_change_of_membership_restarts_for_free(budget):
    action = decide(Outcome(OutcomeKind.REGROUPED), budget)
    assert action == Restart("membership", is_paid=False)
    assert budget.after(action) == budget


@pytest.mark.parametrize(("status", "code"), [(0, 0), (75, 75), (-15, 75)])
def test_workers_that_stop_as_asked_end_the_run_well(status, code):
    action = decide(Outcome(OutcomeKind.STOPPED, status=status, stop_signal=signal.SIGTERM), PLENTY)
    assert isinstance(action, Finish)
    assert action.code == code


@pytest.mark.parametrize(("status", "code"), [(73, 73), (1, 1), (-9, 137), (-11, 139), (143, 143)])
def test_a_worker_that_fails_while_stopping_passes_its_code_on(status, code):
    action = decide(Outcome(OutcomeKind.STOPPED, status=status, stop_signal=signal.SIGTERM), PLENTY)
    assert isinstance(action, GiveUp)
    assert action.code == code


def test_a_host_that_lost_others_while_stopping_is_started_again_where_something_is_safe():
    lost = Outcome(
        OutcomeKind.STOPPED, 69, signal.SIGTERM, cause=Cause.PEER, newest="checkpoint-20-g1"
    )
    action = decide(lost, NONE_LEFT)
    assert isinstance(action, Finish)
    assert action.code == 75
    assert "at most the work since checkpoint-20-g1 is lost" in action.reason
    assert lost.is_interruption
    assert code_of(decide(lost, RestartBudget(preemptions_left=-1))) == 143
    assert code_of(decide(replace(lost, newest=None), PLENTY)) == 69


TAKEN = Outcome(
    OutcomeKind.STOPPED, -9, signal.SIGTERM, cause=Cause.SIGNAL, newest="checkpoint-20-g1"
)


def test_a_rank_that_was_taken_while_stopping_is_the_preemption_that_it_is():
    action = decide(TAKEN, NONE_LEFT)
    assert isinstance(action, Finish)
    assert action.code == 75
    assert "at most the work since checkpoint-20-g1 is lost" in action.reason
    assert TAKEN.is_interruption
    assert code_of(decide(TAKEN, RestartBudget(preemptions_left=-1))) == 143


@pytest.mark.parametrize(
    "outcome",
    [
        replace(TAKEN, newest=None),
        replace(TAKEN, newest=""),
        replace(TAKEN, cause=Cause.OOM_KILL),
        replace(TAKEN, cause=None),
    ],
)
def test_a_kill_that_leaves_nothing_known_or_was_for_memory_passes_its_signal_on(outcome):
    assert decide(outcome, PLENTY).code == 137


def test_only_a_rank_that_was_taken_makes_a_failure_part_of_a_stop():
    taken = replace(TAKEN, kind=OutcomeKind.FAILED)
    assert taken.as_part_of_stop() == TAKEN
    for other in (replace(taken, cause=Cause.OOM_KILL), replace(taken, status=1)):
        assert other.as_part_of_stop() == other


@pytest.mark.parametrize(
    ("newest", "words"),
    [
        (
            "checkpoint-20-g1",
            "the work since checkpoint-20-g1 is lost; it is intact and the same command resumes",
        ),
        ("", "the work since the last checkpoint is lost; it is intact and the same command"),
        (None, "nothing was committed yet, so all work is lost"),
    ],
)
def test_work_that_sigterm_cost_is_told_and_ends_with_143(newest, words):
    outcome = Outcome(OutcomeKind.STOPPED, -15, signal.SIGINT, is_unsaved=True, newest=newest)
    action = decide(outcome, PLENTY)
    assert isinstance(action, GiveUp)
    assert action.code == 143
    assert words in action.reason


def test_workers_that_were_not_in_training_lost_no_step():
    action = decide(Outcome(OutcomeKind.STOPPED, -15, signal.SIGTERM, newest=None), PLENTY)
    assert isinstance(action, Finish)
    assert "outside training, according to the workers" in action.reason


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(OutcomeKind.PREEMPTED, 75),
        Outcome(OutcomeKind.STOPPED, 75, signal.SIGTERM),
        Outcome(OutcomeKind.STOPPED, 143, signal.SIGTERM),
        Outcome(OutcomeKind.STOPPED, -15, signal.SIGTERM, is_unsaved=True),
        Outcome(OutcomeKind.KILLED, 0, signal.SIGTERM),
        Outcome(OutcomeKind.FAILED, 1, signal.SIGTERM),
    ],
)
@pytest.mark.parametrize("wish", ["never", "checkpoint-5-g1"])
def test_a_command_that_would_not_resume_is_not_named(outcome, wish):
    action = decide(outcome, replace(PLENTY, again=name_command(wish)))
    assert f"the same command without --resume {wish} resumes" in action.reason


def test_the_command_is_the_same_where_it_resumes():
    assert name_command("auto") == "the same command"


def test_workers_killed_after_others_had_left_end_with_the_signal_that_killed_them():
    assert code_of(decide(Outcome(OutcomeKind.KILLED), PLENTY)) == 137


@pytest.mark.parametrize("code", [143, 130])
def test_workers_that_left_at_once_lost_work_and_are_not_reported_as_saved(code):
    action = decide(Outcome(OutcomeKind.STOPPED, status=code, stop_signal=signal.SIGTERM), PLENTY)
    assert isinstance(action, GiveUp)
    assert action.code == code
    assert "work since the last checkpoint is lost" in action.reason
    assert "intact and the same command resumes" in action.reason


@pytest.mark.parametrize(("asked_by", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_workers_that_had_to_be_killed_end_with_the_signal_asked_with(asked_by, code):
    action = decide(Outcome(OutcomeKind.KILLED, stop_signal=asked_by), PLENTY)
    assert isinstance(action, GiveUp)
    assert action.code == code
    assert "last durable checkpoint is intact" in action.reason
    assert "same command resumes" in action.reason


def test_lost_peers_are_worth_a_retry_by_the_scheduler():
    action = decide(Outcome(OutcomeKind.UNREACHABLE, reason="closed"), PLENTY)
    assert action == GiveUp(69, "closed")


@pytest.mark.parametrize(("status", "code"), [(0, 0), (75, 75), (-9, 137), (-2, 130)])
def test_a_status_becomes_what_a_shell_would_show(status, code):
    assert exit_code(status) == code


def test_a_status_has_a_name():
    assert name_of(7) == "exit code 7"
    assert name_of(-9) == "SIGKILL"
    assert name_of(-35) == "signal 35"


@pytest.mark.parametrize(
    ("kind", "is_permanent"),
    [(one, one.exit_code in PERMANENT_CODES or one.code in errors.REFUSAL_CODES) for one in KINDS],
)
def test_error_that_refuses_a_start_is_never_tried_again(kind, is_permanent):
    is_echo = kind.code in ECHO_CODES
    outcome = Outcome(
        OutcomeKind.FAILED,
        kind.exit_code,
        is_echo=is_echo,
        is_refusal=kind.code in errors.REFUSAL_CODES,
    )
    action = decide(outcome, PLENTY)
    if is_permanent and not is_echo:
        assert isinstance(action, GiveUp)
        assert action.code == kind.exit_code
    else:
        assert isinstance(action, Restart)


@pytest.mark.parametrize(
    "kind", [one for one in KINDS if one.code.startswith(("RES-CKPT", "RES-CONFIG", "RES-RESUME"))]
)
def test_error_of_a_checkpoint_or_a_setting_is_permanent(kind):
    assert kind.exit_code in PERMANENT_CODES or kind.code in errors.REFUSAL_CODES


def test_damage_met_after_a_step_is_tried_again():
    outcome = Outcome(OutcomeKind.FAILED, 1, is_refusal=True, has_stepped=True)
    assert isinstance(decide(outcome, PLENTY), Restart)


def test_damage_refused_before_a_step_ends_the_run_with_its_code():
    action = decide(Outcome(OutcomeKind.FAILED, 1, is_refusal=True), PLENTY)
    assert isinstance(action, GiveUp)
    assert action.code == 1
    assert "rejected the checkpoint before its first step" in action.reason
