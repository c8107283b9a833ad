"""What the tests of the command line share."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from resilient_cli.app import main
from tests.helpers.cli_repositories import TickingClock
from tests.helpers.json_schemas import check_output
from tests.helpers.manifest_schemas import check_schema
from tests.services import kubectl
from tests.services.apiserver import ApiServer
from tests.services.presence import require
from tests.services.tls import make_certificate

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
    for module in ("ls", "inspect", "prune", "rollback", "unlock"):
        clock = f"resilient_cli.commands.{module}.SystemClock"
        monkeypatch.setattr(clock, lambda: TickingClock(59))

    def run(*arguments):
        status = main([str(one) for one in arguments])
        captured = capsys.readouterr()
        check_output(captured.out + captured.err)
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


@pytest.fixture(scope="module")
def api_server(tmp_path_factory):
    """Run an API server that the real kubectl talks to."""
    require("kubectl", kubectl.why_impossible())
    folder = tmp_path_factory.mktemp("cluster")
    api = ApiServer(lambda one: check_schema(one, "1.36"), make_certificate(folder / "tls"))
    yield api
    api.stop()


@pytest.fixture
def cluster(api_server, tmp_path_factory, monkeypatch):
    """Let kubectl talk to an API server that has nothing yet."""
    folder = tmp_path_factory.mktemp("kubectl")
    (folder / "config").write_text(api_server.kubeconfig(), encoding="utf-8")
    monkeypatch.setenv("KUBECONFIG", str(folder / "config"))
    monkeypatch.setenv("PATH", str(kubectl.PLACE), prepend=":")
    monkeypatch.setenv("HOME", str(folder))
    cache = api_server.certificate.authority.parent.parent / "cache"
    monkeypatch.setenv("KUBECACHEDIR", str(cache))
    api_server.clear()
    return api_server
