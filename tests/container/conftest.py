"""The program, called in this process, as in the tests of the command line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from resilient_cli.app import main


@pytest.fixture
def call(capsys):
    def run(*arguments):
        status = main([str(one) for one in arguments])
        said = capsys.readouterr()
        return SimpleNamespace(status=status, stdout=said.out, stderr=said.err)

    return run
