"""How the agent's facts read."""

import signal

from resilient.elastic.events import WorkerFailed, frames_of


def failed(**changes):
    facts = {
        "rank": 3,
        "local_rank": 1,
        "host": "h",
        "pid": 42,
        "life": 2,
        "status": 1,
        "cause": "exit",
        "proof": "",
        "error": "ValueError: boom",
        "hint": "",
        "traceback": "".join(f"line {number}\n" for number in range(40)),
        "others": 6,
        "safe": "checkpoint-5-g1 is committed",
        "follows": "exit 1",
    }
    return WorkerFailed(**{**facts, **changes}).message()


def test_a_failure_is_one_block_that_names_rank_place_end_and_what_follows():
    block = failed()
    assert block.startswith("rank 3 failed first in attempt 2: ValueError: boom\n")
    assert "host h, pid 42, local rank 1" in block
    assert "exit code 1" in block
    assert "6 more workers of this host failed after it" in block
    assert "checkpoint-5-g1 is committed" in block
    assert block.endswith("exit 1")


def test_only_the_end_of_a_traceback_is_shown():
    block = failed()
    assert "line 39" in block
    assert "line 25" in block
    assert "line 24" not in block


def test_a_kill_names_its_usual_cause():
    block = failed(status=-signal.SIGKILL, error="", traceback="")
    assert block.startswith("rank 3 failed first in attempt 2: SIGKILL")
    assert "out-of-memory" in block


def test_what_is_not_known_takes_no_line():
    block = failed(others=0)
    assert "others" not in block
    assert "hint" not in block


def test_frames_of_a_refusal_are_shown_without_its_text():
    text = "no checkpoint at s3://a:\n  none"
    chain = "\nThe above exception was the direct cause of the following exception:\n\n"
    first = f"Traceback (most recent call last):\n  in guard\nresilient.X: {text}\n"
    last = f"Traceback (most recent call last):\n  in script\nresilient.X: rank 0: {text}\n"
    other = "Traceback (most recent call last):\n  in store\nOSError: 5\n"
    frames = frames_of(chain.join([other, first, last]), f"X: rank 0: {text}")
    assert frames == chain.join([other, "Traceback (most recent call last):\n  in script"])


def test_frames_of_a_traceback_with_another_end_are_whole():
    text = "Traceback\n  in script\nY: other\n"
    assert frames_of(text, "X: gone") == frames_of(text, "") == text
