"""What a page of the documentation tells its readers to type."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from gangs import ROOT

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
    told = [line[: _ENDS.search(line).start()] for line in lines if line.startswith("resilient ")]
    return [line.split()[1:] for line in told]


def paste(shell, folder, environment=()):
    """Run what a page says in a folder, with our program on the PATH; return what was said."""
    program = folder / "bin" / "resilient"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m resilient_cli "$@"\n')
    program.chmod(0o755)
    environ = {**os.environ, **dict(environment), "OMP_NUM_THREADS": "1"}
    environ["PATH"] = f"{program.parent}:{environ['PATH']}"
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "cli")])
    work = folder / "work"
    work.mkdir()
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", shell],
        cwd=work,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return work, done.stdout + done.stderr
