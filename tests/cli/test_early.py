"""Which calls of the program listen for signals before anything is imported."""

import signal

import pytest

from resilient_cli import app, process_exit


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (("train", "x.py"), "train"),
        (("--json", "--timeout", "3s", "--format", "json", "train"), "train"),
        (("--format=json", "train"), "train"),
        (("chaos", "run", "kills", "--", "train", "x.py"), "chaos"),
        (("--help",), ""),
        ((), ""),
    ],
)
def test_the_command_is_found_behind_the_global_options(arguments, command):
    assert process_exit.command_of(arguments) == command


def test_all_global_options_with_a_value_are_known():
    options = {
        name
        for one in app.build().params
        if one.name
        in ("output_format", "timeout", "json", "quiet", "debug", "no_color", "no_input")
        and not one.is_flag
        for name in one.opts
    }
    assert options == process_exit.WITH_VALUES


def test_other_commands_are_ended_as_ever():
    before = signal.getsignal(signal.SIGTERM)
    process_exit.record_early_signals(("ckpt", "ls"))
    assert signal.getsignal(signal.SIGTERM) == before


def test_what_is_ignored_stays_ignored_and_what_came_is_passed_on():
    came = []
    before = (
        signal.signal(signal.SIGHUP, signal.SIG_IGN),
        signal.signal(signal.SIGUSR1, lambda number, _frame: came.append(number)),
    )
    try:
        process_exit.record_early_signals(("train", "x.py"))
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        signal.raise_signal(signal.SIGUSR1)
        assert process_exit.pending_signals == [signal.SIGUSR1]
        assert not came
        process_exit.stop_listening()
        assert came == [signal.SIGUSR1]
    finally:
        process_exit.pending_signals.clear()
        signal.signal(signal.SIGHUP, before[0])
        signal.signal(signal.SIGUSR1, before[1])
