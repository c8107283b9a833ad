"""What counts as progress between lives."""

from resilient.elastic.restart_controller import ProgressLog, ProgressState


def log_of(*answers):
    rest = iter(answers)
    return ProgressLog(lambda _seconds: next(rest))


def failed(log):
    log.look()
    return log.count_failure()


def test_a_first_life_that_commits_nothing_made_no_progress():
    assert not failed(log_of(None, None))


def test_a_checkpoint_of_an_earlier_job_is_not_progress_of_this_one():
    assert not failed(log_of("checkpoint-5-g1", "checkpoint-5-g1"))


def test_a_new_checkpoint_is_progress_once():
    log = log_of(None, "a", "a", "b")
    assert failed(log)
    assert not failed(log)
    assert failed(log)


def test_a_repository_that_does_not_answer_is_no_evidence_and_forgets_nothing():
    log = log_of("a", ProgressState.UNKNOWN, ProgressState.UNKNOWN, "a", "b")
    assert failed(log) is None
    assert failed(log) is None
    assert log.describe() == "a is committed"
    assert log.newest_name == ""
    assert failed(log) is False, "the checkpoint of the start is no progress"
    assert failed(log) is True


def test_a_checkpoint_that_nobody_could_see_at_the_start_may_be_old():
    log = log_of(ProgressState.UNKNOWN, "a", "a")
    assert failed(log)
    assert not failed(log)


def test_without_a_repository_there_is_no_evidence_of_a_crash_loop():
    log = ProgressLog(None)
    assert failed(log)
    assert failed(log)
    assert "no --repo" in log.describe()


def test_a_life_that_hardly_begins_gets_nowhere_where_nobody_says_what_is_committed():
    log = ProgressLog(None)
    assert not log.count_failure(is_brief=True)
    known = log_of(None, "a")
    known.look()
    assert known.count_failure(is_brief=True), "a checkpoint says more than a clock"


def test_what_is_safe_is_said_in_words():
    assert log_of(None).describe() == "no checkpoint was committed yet"
    assert "does not answer" in log_of(ProgressState.UNKNOWN).describe()


def test_a_repository_that_is_told_late_counts_from_then_on():
    log = log_of(ProgressState.URL_UNKNOWN, "old", "old", ProgressState.URL_UNKNOWN)
    assert failed(log), "it may be new: nobody looked before"
    assert not failed(log)
    assert not failed(log)
    assert log.describe() == "old is committed"


def test_a_repository_that_is_told_late_and_empty_has_seen_no_progress():
    assert not failed(log_of(ProgressState.URL_UNKNOWN, None))


def test_the_newest_checkpoint_has_a_name_where_it_is_known():
    assert log_of("a").newest_name == "a"
    assert log_of(None).newest_name is None
    assert ProgressLog(None).newest_name == ""
