"""The run of mutmut: selection of modules, limits on survivors, configuration."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.mutants import generated
from tests.mutants.generated import Module, make_tree, read_modules, report, select

ROOT = Path(__file__).resolve().parents[2]
RESULTS = {"one": "killed", "two": "survived", "three": "timeout", "four": "no tests"}


def judge(survivors, results=RESULTS):
    return report(Module("resilient/one.py", [], survivors), results, generated.WORK / "one")


def test_modules_to_mutate_and_their_tests_exist():
    modules = read_modules().values()
    paths = {path for module in modules for path in (module.path, *module.tests)}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_every_module_of_format_is_mutated():
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "resilient/format").glob("*.py")}
    assert modules - read_modules().keys() == {"resilient/format/__init__.py"}


def test_survivors_within_the_limit_pass(capsys):
    assert not judge(2)
    shown = capsys.readouterr().out
    assert "4 mutants, 2 survived (2 allowed)" in shown
    assert "survived  two" in shown
    assert "no tests  four" in shown


def test_survivors_above_the_limit_fail():
    assert judge(1)


def test_survivors_below_the_limit_ask_for_a_lower_number(capsys):
    assert not judge(3)
    assert "lower the number" in capsys.readouterr().out


def test_survivors_without_a_limit_are_reported(capsys):
    assert not judge(None)
    assert "no limit is stored" in capsys.readouterr().out


@pytest.mark.parametrize("results", [{}, {"one": "not checked"}])
def test_mutants_without_a_result_are_an_error(results):
    with pytest.raises(SystemExit, match="without a result"):
        judge(9, results)


def test_unlisted_module_runs_with_the_unit_tests_that_name_it():
    (module,) = select(["resilient/redaction.py"])
    assert module.survivors is None
    assert module.tests
    assert all(path.startswith("tests/unit/") for path in module.tests)


def test_unknown_module_is_an_error():
    with pytest.raises(SystemExit, match="no such module"):
        select(["resilient/nothing.py"])


def test_tree_of_a_module_configures_mutmut_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(generated, "WORK", tmp_path)
    monkeypatch.setattr(generated, "TREE", ("docs",))
    tree = make_tree(read_modules()["resilient/save_interval.py"])
    config = tomllib.loads((tree / "pyproject.toml").read_text())["tool"]["mutmut"]
    assert config["only_mutate"] == ["resilient/save_interval.py"]
    assert config["pytest_add_cli_args_test_selection"] == ["tests/unit/goodput/test_interval.py"]
    assert config["process_isolation"] == "forkserver"
