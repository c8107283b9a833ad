"""The edge of the program: errors to text and exit codes, global options, what is imported."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from typing import Annotated

import pytest
import typer

import resilient.errors
from resilient.errors import ResilientError
from resilient.redaction import redact_userinfo
from resilient_cli.output import human_age, human_size
from tests.helpers.cli_repositories import write_usual_run

EXIT_CODES = {
    "ResilientError": (1, "RES-ERROR"),
    "ConfigError": (78, "RES-CONFIG"),
    "UsageError": (2, "RES-USAGE"),
    "StoreError": (69, "RES-STORE"),
    "KeyNotFound": (66, "RES-STORE-404"),
    "KeyExists": (80, "RES-STORE-412"),
    "StoreUnavailable": (69, "RES-STORE-503"),
    "StoreFull": (73, "RES-STORE-507"),
    "StoreDenied": (77, "RES-STORE-403"),
    "NotExclusive": (78, "RES-STORE-EXCL"),
    "RepositoryNotFound": (66, "RES-REPO-404"),
    "ScriptNotFound": (66, "RES-SCRIPT-404"),
    "NotRunning": (66, "RES-RUN-404"),
    "ClusterUnavailable": (69, "RES-CLUSTER-503"),
    "ClusterDenied": (77, "RES-CLUSTER-403"),
    "ClusterConflict": (80, "RES-CLUSTER-409"),
    "NothingToResume": (66, "RES-RESUME-NONE"),
    "StartOverRefused": (78, "RES-START-OVER"),
    "IntegrityError": (1, "RES-CKPT-DAMAGED"),
    "SignatureRefused": (77, "RES-CKPT-SIGNATURE"),
    "NoIntactCheckpoint": (3, "RES-CKPT-NONE-INTACT"),
    "IncompatibleCheckpoint": (65, "RES-CKPT-INCOMPATIBLE"),
    "UnknownLayout": (65, "RES-CKPT-LAYOUT"),
    "UnsavableState": (78, "RES-STATE-UNSAVABLE"),
    "SaveFailed": (73, "RES-SAVE-FAILED"),
    "SaveAbandoned": (69, "RES-SAVE-PEER"),
    "Fenced": (80, "RES-FENCED"),
    "WriterAlive": (80, "RES-WRITER-ALIVE"),
    "PeerFailed": (69, "RES-PEER"),
    "DeadlineExceeded": (69, "RES-DEADLINE"),
    "CrashLoop": (70, "RES-CRASH-LOOP"),
    "NumbersBroken": (70, "RES-NUMBERS"),
    "WorkerFailed": (1, "RES-WORKER"),
    "Preempted": (75, "RES-PREEMPTED"),
}


def all_errors(base=ResilientError):
    """Return the base and every class below it that the library itself defines."""
    below = [one for child in base.__subclasses__() for one in all_errors(child)]
    return [base, *(one for one in below if one.__module__ == resilient.errors.__name__)]


@pytest.fixture
def failing(monkeypatch, call):
    """Call the program with a `version` that raises."""

    def run(error, *arguments):
        def version():
            raise error

        monkeypatch.setattr("resilient_cli.commands.version.version", version)
        return call("version", *arguments)

    return run


def test_the_table_of_exit_codes_names_every_error():
    assert set(EXIT_CODES) == {one.__name__ for one in all_errors()}


def test_res_ids_are_unique():
    codes = [one.code for one in all_errors()]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("error", all_errors(), ids=lambda one: one.__name__)
def test_every_error_becomes_its_exit_code_and_its_id(error, failing):
    outcome = failing(error("it broke", hint="mend it"))
    assert (outcome.status, error.code) == EXIT_CODES[error.__name__]
    assert outcome.stdout == ""
    assert outcome.stderr == f"error: it broke  [{error.code}]\n  hint: mend it\n"


def test_a_worker_s_own_exit_code_is_passed_on(failing):
    outcome = failing(resilient.errors.WorkerFailed("rank 0 ended with 17", status=17))
    assert outcome.status == 17


def test_in_json_an_error_is_one_last_line_on_stderr(failing):
    outcome = failing(resilient.errors.StoreFull("no space", hint="make room"), "--json")
    assert outcome.stdout == ""
    assert json.loads(outcome.stderr) == {
        "schema": "resilient/error@1", "type": "error", "exit": 73, "code": "RES-STORE-507",
        "message": "no space", "hint": "make room",
    }  # fmt: skip


def test_an_unexpected_error_is_short_without_debug_and_a_traceback_with_it(failing):
    brief = failing(ZeroDivisionError("by zero"))
    assert brief.status == 1
    assert "Traceback" not in brief.stderr
    assert "unexpected ZeroDivisionError: by zero" in brief.stderr
    assert "Traceback" in failing(ZeroDivisionError("by zero"), "--debug").stderr


def test_a_traceback_that_nobody_asked_for_is_kept_and_its_place_told(
    failing, tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    told = failing(ZeroDivisionError("no s3://me:secret@host/run")).stderr
    (path,) = tmp_path.iterdir()
    assert f"hint: cat {path}" in told
    kept = path.read_text(encoding="utf-8")
    assert "Traceback" in kept
    assert "secret" not in kept
    assert path.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "no"))
    assert "hint:" not in failing(ZeroDivisionError("by zero")).stderr


def test_the_timeout_is_of_the_one_command(tmp_path, call):
    from resilient_cli.durations import WITHIN_SECONDS

    write_usual_run(tmp_path / "run")
    before = WITHIN_SECONDS.get()
    assert call("ckpt", "ls", tmp_path / "run", "--timeout", "5s").status == 0
    assert WITHIN_SECONDS.get() == before
    assert call("ckpt", "ls", tmp_path / "run", "--timeout", "5").status == 2
    assert "--timeout" not in call("train", "--help").stdout


def test_the_timeout_is_how_long_storage_is_asked_again(call, monkeypatch):
    from resilient_cli import repositories

    asked = []

    def open_nothing(url, **options):
        asked.append((url, options["within_seconds"]))
        raise resilient.errors.StoreUnavailable("no answer")

    monkeypatch.setattr(repositories, "open_store", open_nothing)
    for arguments in (("--timeout", "2m", "ckpt", "ls", "s3://b/r"), ("ckpt", "ls", "s3://b/r")):
        assert call(*arguments).status == 69
    assert asked == [("s3://b/r", 120.0), ("s3://b/r", 60.0)]


def test_an_interrupt_is_130(failing):
    assert failing(KeyboardInterrupt()).status == 130


def test_credentials_in_a_url_are_not_shown(failing):
    outcome = failing(ResilientError("no answer from s3://me:secret@host/run"))
    assert "secret" not in outcome.stderr
    assert redact_userinfo("https://u:p@h/x and s3://b/a@b") == "https://***@h/x and s3://b/a@b"


@pytest.mark.parametrize(
    "arguments", [("--bogus",), ("vversion",), ("ckpt", "lss"), ("ckpt", "ls")]
)
def test_wrong_usage_is_2_on_stderr_in_both_formats(arguments, call):
    outcome = call(*arguments)
    assert (outcome.status, outcome.stdout) == (2, "")
    assert "[RES-USAGE]" in outcome.stderr
    assert json.loads(call(*arguments, "--json").stderr)["exit"] == 2


def test_a_mistyped_command_is_answered_with_the_nearest(call):
    assert "Did you mean 'version'" in call("vversion").stderr


def test_global_options_are_taken_before_and_after_the_command(tmp_path, call):
    write_usual_run(tmp_path / "run")
    before = call("--json", "ckpt", "ls", tmp_path / "run")
    between = call("ckpt", "--json", "ls", tmp_path / "run")
    after = call("ckpt", "ls", tmp_path / "run", "--format", "json")
    assert json.loads(before.stdout) == json.loads(between.stdout) == json.loads(after.stdout)


def test_without_arguments_the_help_is_shown(call):
    outcome = call()
    assert (outcome.status, outcome.stdout) == (2, "")
    assert "ckpt" in outcome.stderr
    assert "error:" not in outcome.stderr


def test_every_command_has_help(call):
    for arguments in ((), ("ckpt",), ("ckpt", "ls"), ("ckpt", "verify"), ("version",)):
        outcome = call(*arguments, "--help")
        assert (outcome.status, outcome.stderr) == (0, "")
        assert "Usage: resilient" in outcome.stdout


@pytest.mark.parametrize(
    ("environment", "arguments", "colored"),
    [
        ({"FORCE_COLOR": "1"}, (), True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, (), False),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, (), False),
        ({"FORCE_COLOR": "1"}, ("--no-color",), False),
        ({}, (), False),
    ],
)
def test_colours_follow_the_conventions(
    environment, arguments, colored, tmp_path, call, monkeypatch
):
    write_usual_run(tmp_path / "run")
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    outcome = call("ckpt", "ls", tmp_path / "run", *arguments)
    assert ("\x1b[" in outcome.stdout) == colored


def test_a_name_from_a_file_cannot_move_the_cursor():
    from resilient_cli.output import Output, Table, _human_lines, _plain_lines

    table = Table(("NAME",), (("a\x1b[2Jb\tc",),))
    for lines in (_human_lines([table], is_colored=Output().color), _plain_lines([table])):
        assert list(lines)[-1] == "a\\x1b[2Jb\\tc"


def test_sizes_and_ages_read_well():
    sizes = [0, 1023, 1024, 1536, 1024**2 - 1, 5 * 1024**3, 3 * 1024**6]
    assert list(map(human_size, sizes)) == [
        "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "5.0 GiB", "3.0 EiB",
    ]  # fmt: skip
    ages = [-5, 0, 59.9, 60, 3599, 3600, 86399, 86400 * 12]
    assert list(map(human_age, ages)) == ["0s", "0s", "59s", "1m", "59m", "1h", "23h", "12d"]


_PROBE = """
import sys
from resilient_cli.app import main
try:
    status = main({arguments!r})
except SystemExit as error:
    status = error.code
heavy = [one for one in ("torch", "numpy", "fsspec", "rich") if one in sys.modules]
print("\\nPROBE", status, heavy)
"""


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["version"], ["ckpt", "--help"], ["ckpt", "ls"], ["ckpt", "ls", "--json"],
     ["ckpt", "inspect"], ["ckpt", "verify", "--level", "full"]],
    ids=" ".join,
)  # fmt: skip
def test_no_command_but_train_imports_torch_or_anything_heavy(arguments, tmp_path, monkeypatch):
    write_usual_run(tmp_path / "run")
    monkeypatch.setenv("RESILIENT_REPO", str(tmp_path / "run"))
    probe = _PROBE.format(arguments=arguments)
    done = subprocess.run(
        [sys.executable, "-c", probe], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "PROBE 0 []"


def train(ctx: typer.Context, script: str, rest: Annotated[list[str], typer.Argument()]) -> int:
    """Stand in for the real command, which loads torch."""
    assert (script, rest) == ("script.py", ["--json", "--steps", "3"])
    assert ctx.find_root().obj.format.value == "human"
    return 75


def test_options_after_the_script_belong_to_the_script(monkeypatch, call):
    module = types.ModuleType("resilient_cli.commands.train")
    module.train = train
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert call("train", "script.py", "--json", "--steps", "3").status == 75
