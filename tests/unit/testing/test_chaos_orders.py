"""An order to end is raised once, and the way out is not disturbed."""

import signal
import subprocess

import pytest

from resilient.testing.chaos.runner import Terminated, obeying_orders


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_an_order_is_raised_once_and_others_disturb_nothing(number):
    # A nohup around the tests would have it ignored, and rightly so.
    before = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    around = signal.signal(number, before)
    steps = []

    def ordered():
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(signal.SIGTERM)
            steps.append("cleaned up")

    with pytest.raises(Terminated) as caught, obeying_orders():
        ordered()
    after = signal.signal(number, around)
    assert caught.value.number == number
    assert str(caught.value) == number.name
    assert steps == ["cleaned up"]
    assert after == before


def test_what_was_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with obeying_orders():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_process_of_which_nobody_knows_yet_ends_with_it():
    started = []

    def ordered():
        started.append(subprocess.Popen(["sleep", "60"]))
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Terminated), obeying_orders():
        ordered()
    (child,) = started
    child.wait(10)
    assert child.returncode == -signal.SIGKILL
