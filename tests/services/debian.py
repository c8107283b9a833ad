"""Programs from Debian, installed by the tests that need them."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_LOCK = Path(tempfile.gettempdir()) / "resilient-tests-apt.lock"
_PATIENCE_SECONDS = 900
_TRIES = 3


def why_missing(programs: Sequence[str], packages: Sequence[str]) -> str:
    """Return why programs are not here, or nothing after installing what is missing.

    Installs only as root, and only if apt is there; one process at a time, for apt refuses a
    second one.
    """
    if all(map(shutil.which, programs)):
        return ""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return f"not installed, and only root can: apt-get install {' '.join(packages)}"
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        problem = ""
        for _ in range(_TRIES):
            if all(map(shutil.which, programs)):
                return ""
            # A mirror that did not answer may answer now.
            problem = _install(programs, packages)
        return problem


def _install(programs: Sequence[str], packages: Sequence[str]) -> str:
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    wait = ("-o", "DPkg::Lock::Timeout=300")
    install = ("apt-get", *wait, "install", "-y", "--no-install-recommends", *packages)
    for command in (("apt-get", *wait, "update"), install):
        done = subprocess.run(
            command, env=quiet, capture_output=True, check=False, timeout=_PATIENCE_SECONDS
        )
        if done.returncode:
            return f"{' '.join(command)} failed: {done.stderr.decode()[-200:]}"
    return "" if all(map(shutil.which, programs)) else "apt-get installed it, and it is not there"
