"""A newer Debian in a folder of its own, for programs that this machine's release has not.

Ceph 20 holds the checksums of S3 against what arrives; Ceph 16 passes over them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.services.debian import why_missing

if TYPE_CHECKING:
    from collections.abc import Sequence

SUITE, MIRROR = "testing", "http://deb.debian.org/debian"
CEPH_PACKAGES = ("ceph-mon", "ceph-osd", "radosgw", "ceph-common")
_PATIENCE_SECONDS = 180
_OPTIONS = (
    "--variant=apt",
    '--aptopt=APT::Install-Recommends "false"',
    # A mirror that was copied some weeks ago says that it is out of date.
    '--aptopt=Acquire::Check-Valid-Until "false"',
)


def newer_ceph() -> tuple[Path, str]:
    """Return a root with Ceph 20, made if it is missing; and if that cannot be, why not."""
    return newer_root("ceph", CEPH_PACKAGES)


def newer_root(name: str, packages: Sequence[str]) -> tuple[Path, str]:
    """Return the root of a newer Debian with these packages, and why there is none, or nothing.

    Makes it only as root, where a folder can be entered as one; one process at a time.

    Args:
        name: of the root.
        packages: what is in it.
    """
    root = Path(tempfile.gettempdir()) / f"resilient-tests-{name}-{SUITE}"
    if os.geteuid() != 0:
        return root, "only root can enter another root"
    if problem := why_missing(("mmdebstrap",), ("mmdebstrap",)):
        return root, problem
    with root.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return root, "" if root.exists() else _make(root, packages)


def _make(root: Path, packages: Sequence[str]) -> str:
    half = root.with_suffix(".half")
    shutil.rmtree(half, ignore_errors=True)
    command = ("mmdebstrap", *_OPTIONS, f"--include={','.join(packages)}", SUITE, half, MIRROR)
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=_PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        return f"{SUITE} was not there after {_PATIENCE_SECONDS} s"
    if done.returncode:
        return f"mmdebstrap failed: {done.stderr.decode()[-300:]}"
    half.rename(root)
    return ""


def main() -> None:
    """Make the root, and say where it is."""
    root, problem = newer_ceph()
    sys.exit(problem) if problem else sys.stdout.write(f"{root}\n")


if __name__ == "__main__":
    main()
