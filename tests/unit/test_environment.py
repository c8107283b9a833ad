"""Values of environment variables: every boolean by one parser, every malformed value refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import resilient
from resilient.distributed.launch_env import read_launch
from resilient.environment import read_choice, read_flag, read_integer, read_seconds
from resilient.errors import ConfigError

FLAGS = (
    "RESILIENT_REQUIRE_SIGNATURE",
    "RESILIENT_SINGLE_WRITER",
    "RESILIENT_TAKE_OVER",
    "TORCHELASTIC_USE_AGENT_STORE",
)
TRUE = ("1", "true", "True", "YES", "on", " 1", "yes\n", "\tOn ")
FALSE = ("0", "false", "No", "OFF", " 0 ", "", "  ")
UNKNOWN = ("2", "-1", "y", "truee", "1 1", "enabled", "None", "null")
SOURCES = Path(resilient.__file__).parents[1]


@pytest.mark.parametrize("name", FLAGS)
def test_launch_flag_every_word_is_read_or_refused(name):
    fields = dict(
        zip(FLAGS, ("require_signature", "single_writer", "takes_over", "hosted"), strict=True),
    )
    for word in TRUE:
        assert getattr(read_launch({name: word}), fields[name]) is True, word
    for word in FALSE:
        assert getattr(read_launch({name: word}), fields[name]) is False, word
    for word in UNKNOWN:
        with pytest.raises(ConfigError, match=f"{name}=.*1, true, yes, on, 0, false") as caught:
            read_launch({name: word})
        assert caught.value.exit_code == 78
        assert caught.value.hint == f"unset {name}"


def test_flag_unset_has_its_default():
    assert read_flag({}, "X", default=True) is True
    assert read_flag({"X": " "}, "X", default=True) is True
    assert read_flag({"X": "off"}, "X", default=True) is False


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("RANK", ("one", "1.5", "-1")),
        ("WORLD_SIZE", ("two", "0", "1e3")),
        ("LOCAL_RANK", ("x", "-1")),
        ("MASTER_PORT", ("http", "-5")),
        ("RESILIENT_AGENT_PID", ("me", "-1")),
        ("RESILIENT_UNTIL_STEP", ("all", "-3", "10steps")),
        ("RESILIENT_GRACE", ("soon", "nan", "inf", "-1", "30s")),
    ],
)
def test_launch_malformed_number_is_refused(name, values):
    for value in values:
        with pytest.raises(ConfigError, match=name):
            read_launch({name: value})


def test_numbers_and_words_are_read_with_blanks_around():
    assert read_integer({"X": " 7 "}, "X", 1) == 7
    assert read_integer({"X": ""}, "X", 1) == 1
    assert read_seconds({"X": " 1.5"}, "X") == 1.5
    assert read_choice({"X": " End "}, "X", ("end",), "no") == "end"
    assert read_choice({}, "X", ("end",), "no") == "no"
    with pytest.raises(ConfigError, match="X='ends' is not accepted: expected one of end"):
        read_choice({"X": "ends"}, "X", ("end",), "no")


def test_no_module_compares_a_variable_with_a_word():
    """A second parser would accept other words than the first."""
    words = re.compile(
        r"environ(?:\.get\(|\[)[^)\]]*[)\]](?:\.(?:lower|upper|strip)\(\))*\s*(?:==|!=|in )"
        r"|\b(?:int|float|bool)\(\s*(?:os\.)?environ"
    )
    allowed = {
        # These run before any package is imported, and the agent itself wrote the variable.
        "bootstrap.py": 1,
        "fork_server.py": 1,
        # Conventions of terminals: NO_COLOR and FORCE_COLOR count whatever their value.
        "output.py": 2,
    }
    found = {}
    for root in ("resilient", "cli"):
        for file in (SOURCES / root).rglob("*.py"):
            hits = len(words.findall(file.read_text(encoding="utf-8")))
            if hits > allowed.get(file.name, 0):
                found[str(file)] = hits
    assert not found
