"""What a page of the documentation tells its readers to type."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.process.gangs import ROOT

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ENDS = re.compile(r"\s(?:[|&;>]|2>|#)|\s*$", re.MULTILINE)


def section(text, title):
    """Return the part of a page below a heading of the second level."""
    return re.split(r"^## ", text, flags=re.MULTILINE)[1:][_titles(text).index(title)]


def _titles(text):
    return re.findall(r"^## (.*)$", text, flags=re.MULTILINE)


def shell_of(text):
    """Return what is to be pasted as it stands: the blocks that are called `sh`."""
    return "".join(block for language, block in _FENCE.findall(text) if language == "sh")


def commands_of(text):
    """Return the calls of our program in all blocks and between backquotes, as words."""
    blocks = "\n".join(block for _, block in _FENCE.findall(text)).replace("\\\n", " ")
    inline = re.findall(r"`(resilient [^`]+)`", _FENCE.sub("", text))
    lines = [line.strip() for line in [*blocks.splitlines(), *inline]]
    commands = [
        line[: _ENDS.search(line).start()] for line in lines if line.startswith("resilient ")
    ]
    return [line.split()[1:] for line in commands]


def paste(shell, folder, environment=(), limit=200):
    """Run what a page says in a folder, with our program on the PATH; return what was said."""
    program = folder / "bin" / "resilient"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m resilient_cli "$@"\n')
    program.chmod(0o755)
    environ = {**os.environ, **dict(environment)}
    environ["PATH"] = f"{program.parent}:{environ['PATH']}"
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "cli")])
    return _run(shell, folder, environ, limit)


def paste_on_a_new_machine(shell, folder, limit=400):
    """Run what a page says where nothing of ours is, and its `pip install` finds this tree's wheel.

    Our package is held to that wheel's version by a constraint; everything else is got from where
    this machine's pip gets it.
    """
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel_file,) = folder.glob("*.whl")
    constraints = folder / "constraints.txt"
    constraints.write_text(f"resilient-train=={wheel_file.name.split('-')[1]}\n")
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ["PIP_CONSTRAINT"] = f"{ROOT / 'constraints.txt'} {constraints}"
    environ["PIP_FIND_LINKS"] = f"{os.environ.get('PIP_FIND_LINKS', '')} {folder}".strip()
    return _run(shell, folder, environ, limit)


def _run(shell, folder, environ, limit):
    """Let a shell that stops at the first failure run it; return the folder and what was said."""
    work = folder / "work"
    work.mkdir()
    process = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", shell],
        cwd=work,
        env={**environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=limit,
    )
    assert process.returncode == 0, f"{process.stdout}\n{process.stderr}"
    return work, process.stdout + process.stderr
