"""What is installed is what was meant to be."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from resilient_cli.commands.help import JSON, PAGES, schema_names

ROOT = Path(__file__).resolve().parents[2]


PACKAGES = (ROOT / "resilient", ROOT / "cli" / "resilient_cli")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def files_of_packages():
    return {
        path.relative_to(package.parent).as_posix()
        for package in PACKAGES
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def files_that_code_reads():
    """Return the paths that occur in the code of the command line as text, by their suffix."""
    paths = set()
    for path in (ROOT / "cli" / "resilient_cli").rglob("*.py"):
        paths |= set(
            re.findall(r"""["']([a-z_/]+/[a-z_]+\.(?:css|js|md|sh))["']""", path.read_text("utf-8"))
        )
    return paths


def test_wheel_top_level_is_two_packages(wheel):
    names = wheel.namelist()
    entry_points = next(name for name in names if name.endswith("entry_points.txt"))
    assert "resilient = resilient_cli.__main__:main" in wheel.read(entry_points).decode()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"resilient", "resilient_cli", "resilient_train-0.1.0.dist-info"}


def test_wheel_has_every_file_of_the_packages(wheel):
    assert files_of_packages() - set(wheel.namelist()) == set()


def test_wheel_has_package_data(wheel):
    names = set(wheel.namelist())
    read = files_that_code_reads()
    assert len(read) >= 4
    topics = {f"help_texts/{name}.md" for name in (*PAGES, JSON)}
    schemas = {f"schemas/{name}.json" for name in schema_names()}
    data = {f"resilient_cli/{path}" for path in read | topics | schemas}
    assert {*data, "resilient/py.typed", "resilient_cli/templates/trainer.toml"} - names == set()
