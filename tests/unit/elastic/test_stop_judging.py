"""When the store is asked after a life, and for how long."""

from types import SimpleNamespace

import pytest

from resilient.clock import SystemClock
from resilient.distributed.stop_request import StopRequest
from resilient.elastic.outcome import Cause, Outcome, OutcomeKind
from resilient.elastic.restart_controller import ProgressLog, ProgressState, RestartController
from resilient.elastic.restart_policy import FailureLimits, Finish, GiveUp, Restart, name_command

SPEC = SimpleNamespace(max_restarts=9, rdzv_handler=SimpleNamespace(get_run_id=lambda: "run"))
TAKEN = Outcome(OutcomeKind.STOPPED, -9, 15, cause=Cause.SIGNAL)
SAVED = [
    Outcome(OutcomeKind.SUCCEEDED),
    Outcome(OutcomeKind.PREEMPTED, 75),
    Outcome(OutcomeKind.STOPPED, 75, 15),
    Outcome(OutcomeKind.STOPPED, 0, 15),
    Outcome(OutcomeKind.KILLED, 0, 15),
]


class StillClock(SystemClock):
    def monotonic_seconds(self):
        return 0.0


class Repository:
    """Answers what it is told to, and remembers how long each answer might have taken."""

    def __init__(self, answer):
        self.answer = answer
        self.asked = []
        self.told = []

    def judge(self, again="the same command"):
        log = ProgressLog(self._ask)
        self.asked.clear()
        return RestartController(SPEC, FailureLimits(), log, StillClock(), self.told.append, again)

    def _ask(self, within_seconds):
        self.asked.append(within_seconds)
        return self.answer

    def heard(self):
        return [type(event).__name__ for event in self.told]


@pytest.mark.parametrize("outcome", SAVED)
def test_nobody_is_asked_where_the_answer_decides_nothing(outcome):
    repository = Repository("checkpoint-20-g1")
    repository.judge().after(outcome, 1, StopRequest("SIGTERM", 25.0))
    assert repository.asked == []


def test_a_failure_waits_for_the_answer_and_a_stop_only_for_a_share_of_its_time():
    repository = Repository("checkpoint-20-g1")
    judge = repository.judge()
    judge.after(Outcome(OutcomeKind.FAILED, 1), 1)
    judge.after(Outcome(OutcomeKind.FAILED, 1, 15), 1, StopRequest("SIGTERM", 25.0))
    judge.after(Outcome(OutcomeKind.FAILED, 1, 15), 1, StopRequest("SIGTERM", 5.0))
    assert repository.asked == [15.0, 2.0, 0.5]


def test_work_that_is_lost_is_told_with_the_checkpoint_that_is_not():
    repository = Repository("checkpoint-20-g1")
    outcome = Outcome(OutcomeKind.STOPPED, -15, 15, is_unsaved=True)
    action = repository.judge(name_command("never")).after(outcome, 1, StopRequest("SIGTERM", 25.0))
    assert isinstance(action, GiveUp)
    assert action.code == 143
    assert "since checkpoint-20-g1 is lost" in action.reason
    assert "without --resume never resumes" in action.reason


def test_a_change_of_membership_asks_what_the_next_life_may_not_throw_away():
    repository = Repository("checkpoint-20-g1")
    repository.judge().after(Outcome(OutcomeKind.REGROUPED), 2)
    assert len(repository.asked) == 1


def test_a_repository_that_does_not_answer_makes_no_crash_loop_and_is_told():
    repository = Repository(ProgressState.UNKNOWN)
    judge = repository.judge()
    actions = [judge.after(Outcome(OutcomeKind.FAILED, 1), 1) for _ in range(5)]
    assert all(isinstance(action, Restart) for action in actions)
    assert repository.heard().count("ProgressUnknown") == 5


def test_a_stop_that_was_saved_names_the_command_that_resumes():
    action = (
        Repository(None).judge(name_command("never")).after(Outcome(OutcomeKind.STOPPED, 75, 15), 1)
    )
    assert isinstance(action, Finish)
    assert action.reason == "stopped and saved: the same command without --resume never resumes"


def test_where_the_answer_decides_the_code_it_gets_half_of_the_time():
    repository = Repository("checkpoint-20-g1")
    repository.judge().after(TAKEN, 1, StopRequest("SIGTERM", 3.0))
    assert repository.asked == [1.5]


def test_what_was_committed_once_is_enough_where_nobody_answers_in_time():
    repository = Repository("checkpoint-20-g1")
    judge = repository.judge()
    repository.answer = ProgressState.UNKNOWN
    assert judge.after(TAKEN, 1, StopRequest("SIGTERM", 3.0)).code == 75
    repository = Repository(None)
    judge = repository.judge()
    repository.answer = ProgressState.UNKNOWN
    assert judge.after(TAKEN, 1, StopRequest("SIGTERM", 3.0)).code == 137


class LateNews:
    """Stops of which somebody hears while it waits."""

    def __init__(self, number):
        self.asked_by = 0
        self.waited = 0
        self._number = number

    def wait(self, _seconds):
        self.waited += 1
        self.asked_by = self._number
        return not self.asked_by


def test_a_kill_that_ends_the_run_is_held_against_what_is_heard_a_moment_later():
    killed = Outcome(OutcomeKind.FAILED, -9, cause=Cause.SIGNAL)
    judge = Repository("checkpoint-20-g1").judge()
    judge.restarts_left = 0
    assert judge.with_late_stop_request(killed, LateNews(15)) == TAKEN
    assert judge.with_late_stop_request(killed, LateNews(0)) == killed
    for other in (Outcome(OutcomeKind.FAILED, 1, cause=Cause.EXIT), Outcome(OutcomeKind.SUCCEEDED)):
        news = LateNews(15)
        assert judge.with_late_stop_request(other, news) == other
        assert not news.waited
    judge.restarts_left = 1
    news = LateNews(15)
    assert judge.with_late_stop_request(killed, news) == killed, "a restart waits for nothing"
    assert not news.waited


class HandClock(SystemClock):
    now_seconds = 0.0

    def monotonic_seconds(self):
        return self.now_seconds


@pytest.mark.parametrize(
    ("seconds", "has_stepped", "lives"), [(59.0, False, 1), (61.0, False, 0), (59.0, True, 0)]
)
def test_without_a_repository_a_life_gets_nowhere_that_ends_soon_and_before_a_step(
    seconds, has_stepped, lives
):
    told, clock = [], HandClock()
    judge = RestartController(SPEC, FailureLimits(), ProgressLog(None), clock, told.append)
    for life in (1, 2):
        clock.now_seconds = life * seconds
        judge.after(Outcome(OutcomeKind.FAILED, 1, has_stepped=has_stepped), 1)
        assert told[-1].no_progress_lives == life * lives


def test_a_loss_is_no_longer_counted_once_a_host_is_known_to_be_gone():
    lost = Outcome(OutcomeKind.REGROUPED, 1, is_echo=True, cause=Cause.PEER)
    for gone, last in (([], GiveUp), (["10.0.0.2"], Restart)):
        judge = RestartController(SPEC, FailureLimits(), ProgressLog(None), StillClock(), [].append)
        for _ in range(10):
            assert isinstance(judge.after(lost, 2), Restart)
            judge.excuse_lost_nodes(gone)
        assert isinstance(judge.after(lost, 2), last)
        assert judge.restarts_left == 9


@pytest.mark.parametrize(
    ("has_stepped", "gone", "last"),
    [(True, ["10.0.0.2"], Restart), (True, [], GiveUp), (False, ["10.0.0.2"], GiveUp)],
)
def test_a_life_that_trained_got_nowhere_because_its_host_is_gone(has_stepped, gone, last):
    judge = Repository("checkpoint-20-g1").judge()
    lost = Outcome(
        OutcomeKind.REGROUPED, 1, is_echo=True, cause=Cause.PEER, has_stepped=has_stepped
    )
    for _ in range(2):
        assert isinstance(judge.after(lost, 2), Restart)
        judge.excuse_lost_nodes(gone)
    assert isinstance(judge.after(lost, 2), last)


def test_hosts_that_go_for_ever_without_progress_are_no_excuse():
    judge = Repository("checkpoint-20-g1").judge()
    lost = Outcome(OutcomeKind.REGROUPED, 1, is_echo=True, cause=Cause.PEER, has_stepped=True)
    found = []
    for _ in range(23):
        found.append(type(judge.after(lost, 2)))
        judge.excuse_lost_nodes(["10.0.0.2"])
    assert found == [Restart] * 22 + [GiveUp]
