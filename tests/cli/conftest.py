"""What the tests of the command line share."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli_repositories import TickingClock

from resilient_cli.app import main

TRANSCRIPTS = Path(__file__).parent / "transcripts"


@dataclass(frozen=True)
class Outcome:
    """What one call of the program did."""

    status: int
    stdout: str
    stderr: str

    def transcript(self, folder: Path) -> str:
        """Return it as text without what differs from machine to machine."""
        text = f"exit {self.status}\n--- stdout\n{self.stdout}--- stderr\n{self.stderr}"
        text = text.replace(str(folder.resolve()), "/REPO").replace(str(folder), "/REPO")
        text = re.sub(r"\b[0-9a-f]{64}\b", "ROOT", text)
        text = re.sub(r"\b[0-9a-f]{32}\b", "DIGEST", text)
        return re.sub(r'"host": "[^"]*"', '"host": "HOST"', text)


@pytest.fixture
def call(capsys, monkeypatch):
    """Call the program in this process."""
    for name in ("RESILIENT_REPO", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for module in ("listing", "inspecting", "keeping", "travelling"):
        clock = f"resilient_cli.commands.{module}.SystemClock"
        monkeypatch.setattr(clock, lambda: TickingClock(59))

    def run(*arguments):
        status = main([str(one) for one in arguments])
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return run


@pytest.fixture
def matches():
    """Hold an outcome against the stored transcript."""

    def check(name, outcome, folder):
        path = TRANSCRIPTS / f"{name}.txt"
        found = outcome.transcript(folder)
        if not path.exists():
            path.write_text(found, encoding="utf-8")
            pytest.fail(f"{path.name} was not there; it is now: read it and run again")
        assert found == path.read_text(encoding="utf-8"), "delete the transcript to store a new one"

    return check
