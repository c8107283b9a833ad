"""The wheel in a root of its own: nobody's user, nothing to write to, none of our source there."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
USER = "10001"
# What a container has: its own root, read-only, and volumes for what changes.
ENTER = """
set -eu
root={root}
mount -t tmpfs -o mode=755 root "$root"
cd "$root"
# First of all: a checkout may lie below it, whose packages are borrowed.
mkdir tmp && mount -t tmpfs -o mode=1777 tmp tmp
mkdir -p usr etc proc dev/shm scratch app opt/venv
for one in bin lib lib64 sbin; do ln -s "usr/$one" "$one"; done
for one in /usr /etc {more}; do mount -o bind,ro "$one" "$root$one"; done
mount -o bind,ro {venv} opt/venv
mount -o bind,ro {app} app
for one in null zero urandom; do touch "dev/$one"; mount -o bind "/dev/$one" "dev/$one"; done
mount -t proc proc proc
mount -t tmpfs -o mode=1777 shm dev/shm
mount -t tmpfs -o mode=700,uid={user},gid={user} scratch scratch
mount -o remount,ro "$root"
exec chroot "$root" setpriv --reuid={user} --regid={user} --clear-groups --no-new-privs \\
  --bounding-set=-all env -i PATH=/opt/venv/bin:/usr/bin:/bin HOME=/scratch OMP_NUM_THREADS=1 \\
  sh -c {command}
"""
COMMAND = """
cd /scratch
id -u
touch /app/x /x /usr/x 2>&1 | grep -c 'Read-only file system'
python -c 'import resilient; print(resilient.__file__)'
exec resilient train --repo /scratch/kept /app/train.py --config /app/train.toml \\
  --max_steps 60 --eval_strategy no
"""


@pytest.fixture
def installed(tmp_path):
    """Install the wheel in an environment that has what its metadata asks for, and no more."""

    def run(*command):
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT, timeout=120)

    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path))
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", str(venv))
    (wheel,) = tmp_path.glob("*.whl")
    into = ("--python", str(venv), "install", "--no-deps", "--no-index", "--quiet", str(wheel))
    run(sys.executable, "-m", "pip", *into)
    # Its scripts name the place where it was made; in the root it is another.
    script = venv / "bin" / "resilient"
    script.write_text(script.read_text().replace(str(venv), "/opt/venv"))
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = venv / "lib" / python / "site-packages"
    # Names in a .pth file do not bring the .pth files of their folders: no source tree of ours.
    (site / "borrowed.pth").write_text("/opt/venv/borrowed\n")
    borrow(needed_by(site), venv / "borrowed")
    return venv


def needed_by(site):
    """Return the distributions that what is installed there asks for, and those ask for."""
    (wheel,) = importlib.metadata.distributions(path=[str(site)])
    found, left = {}, [wheel]
    while left:
        for text in left.pop().requires or ():
            asked = Requirement(text)
            if asked.marker is None or asked.marker.evaluate({"extra": ""}):
                name = canonicalize_name(asked.name)
                if name not in found:
                    found[name] = importlib.metadata.distribution(asked.name)
                    left.append(found[name])
    return found


def borrow(distributions, folder):
    """Make a folder with the top of each distribution: a package that is not asked for is away."""
    folder.mkdir()
    place = Path(sysconfig.get_path("purelib"))
    files = (file for one in distributions.values() for file in one.files or ())
    for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
        if (place / top).exists():
            (folder / top).symlink_to(place / top)


@pytest.mark.smoke
def test_only_what_the_wheel_asks_for_is_there(installed):
    there = {one.name for one in (installed / "borrowed").iterdir()}
    assert {"torch", "numpy", "typer"} <= there
    assert there.isdisjoint({"pytest", "transformers", "hypothesis", "lightning", "resilient"})


def test_the_wheel_trains_as_nobody_on_a_root_that_cannot_be_written(installed, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can make a root of its own")
    for name in ("root", "app"):
        (tmp_path / name).mkdir()
    made = [sys.executable, "-m", "resilient_cli", "init", str(tmp_path / "app"), "-q"]
    subprocess.run(made, check=True, timeout=60)
    more = [sysconfig.get_path("purelib")]
    if not sys.base_prefix.startswith("/usr"):
        more.append(sys.base_prefix)
    text = ENTER.format(
        root=tmp_path / "root",
        venv=installed,
        app=tmp_path / "app",
        user=USER,
        more=" ".join(more),
        command=shlex.quote(COMMAND),
    ).replace("mkdir -p usr", f"mkdir -p {' '.join(one.lstrip('/') for one in more)} usr")
    enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", text]
    done = subprocess.run(enter, capture_output=True, text=True, check=False, timeout=120)
    said = done.stdout + done.stderr
    if "unshare failed" in said:
        pytest.skip(f"no namespaces here: {said}")
    assert done.returncode == 0, said
    assert done.stdout.splitlines()[:2] == [USER, "3"]
    assert done.stdout.splitlines()[2].startswith("/opt/venv/lib/")
    assert "trained to step 60" in said
    assert "exit 0: all workers are done" in said
