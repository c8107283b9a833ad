"""What is installed is what was meant to be."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_wheel_holds_the_two_packages_and_nothing_else(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry_points = next(name for name in names if name.endswith("entry_points.txt"))
        assert "resilient = resilient_cli.__main__:main" in archive.read(entry_points).decode()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"resilient", "resilient_cli", "resilient_train-0.1.0.dist-info"}
    assert "resilient/py.typed" in names
