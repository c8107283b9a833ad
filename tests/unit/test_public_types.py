"""A type checker sees the real types of the public names, which are loaded when they are used."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import resilient

SCRIPT = """from resilient import Checkpointer, Trainer, TrainingArguments

args = TrainingArguments("runs/x", max_steps=5, fsdp=True, save_retention={"keep_every": 2})
TrainingArguments("runs/x", max_stepz=5)  # wrong
TrainingArguments("runs/x", save_retention=5)  # wrong
trainer = Trainer(args=args)
Trainer(args=args, foo=3)  # wrong
trainer.start_training()  # wrong
Checkpointer("runs/x").save("abc")  # wrong
resumed: str = trainer.train()  # wrong
"""
USES = "".join(
    f"from resilient import {name}\n{name}.there_is_no_such_name  # wrong\n"
    for name in resilient.__all__
)


def type_checker_imports():
    """Return the names that a type checker imports, each with its module and its name there."""
    stub = Path(resilient.__file__).with_suffix(".pyi")
    return {
        alias.asname or alias.name: (line.module, alias.name)
        for line in ast.parse(stub.read_text()).body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }


def test_a_type_checker_imports_what_is_loaded():
    homes = {name: home.partition(":") for name, home in resilient._HOMES.items()}
    assert type_checker_imports() == {
        name: (module, there or name) for name, (module, _, there) in homes.items()
    }
    assert {*resilient.__all__} == {"__version__", *resilient._HOMES}
    with pytest.raises(AttributeError, match="no attribute `Trayner`"):
        _ = resilient.Trayner


@pytest.mark.slow
@pytest.mark.parametrize("script", [SCRIPT, USES], ids=["a script", "every name"])
def test_mypy_reports_the_wrong_lines_and_no_other(tmp_path, script):
    file = tmp_path / "script.py"
    file.write_text(script)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "script.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(Path(resilient.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line.split(":") for line in checked.stdout.splitlines() if ": error:" in line]
    assert {parts[0] for parts in errors} == {"script.py"}, checked.stdout + checked.stderr
    wrong = {nth for nth, line in enumerate(script.splitlines(), 1) if line.endswith("# wrong")}
    assert {int(parts[1]) for parts in errors} == wrong, checked.stdout
