"""What is recorded is what the kernel was asked, no more, no less and in the same order."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CALLS = (
    "mkdir,mkdirat,rmdir,open,openat,creat,write,pwrite64,writev,pwritev,pwritev2,fsync,fdatasync,"
    "sync_file_range,syncfs,sync,rename,renameat,renameat2,link,linkat,unlink,unlinkat,truncate,"
    "ftruncate,fallocate,copy_file_range,sendfile,splice,msync"
)
NAMES = {
    "mkdirat": "mkdir",
    "renameat": "rename",
    "renameat2": "rename",
    "linkat": "link",
    "fdatasync": "fsync",
}
LINE = re.compile(r"^(?:\d+ +)?(\w+)\((.*)\)\s+= (-?\d+)(<.*>)?")


def run(folder: Path, *before: str) -> list[str]:
    command = [*before, sys.executable, str(HERE / "recorded.py"), str(folder)]
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )
    if done.returncode != 0 and before:
        pytest.skip(f"strace may not trace here: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def asked(trace: str, top: str) -> list[str]:
    """Return the calls below ``top`` that changed something, in the words of a record."""
    folders: set[str] = set()
    found = [_spelled(line, top, folders) for line in trace.splitlines()]
    return [one for one in found if one]


def _spelled(line: str, top: str, folders: set[str]) -> str:
    match = LINE.match(line)
    if match is None or int(match[3]) < 0:
        return ""
    call, arguments = match[1], match[2]
    paths = [
        one.removeprefix(top).strip("/")
        for one in re.findall(r'[<"]([^<">]*)[>"]', arguments)
        if one == top or one.startswith(f"{top}/")
    ]
    if not paths:
        return ""
    name = NAMES.get(call, call)
    if name == "unlinkat":
        name = "rmdir" if "AT_REMOVEDIR" in arguments else "unlink"
    if name in ("open", "openat", "creat"):
        return f"open {paths[0]}" if "O_CREAT" in arguments else ""
    if name == "mkdir":
        folders.add(paths[-1])
    if name == "fsync" and (paths[0] in folders or not paths[0]):
        name = "fsync of a folder"
    if name == "write":
        paths.append(match[3])
    return " ".join([name, *paths])


@pytest.mark.smoke
def test_the_record_is_what_the_kernel_was_asked(tmp_path):
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed: nobody independent to ask")
    top, trace = tmp_path / "top", tmp_path / "trace"
    top.mkdir()
    told = run(top, strace, "-f", "-y", "-s", "4", "-o", str(trace), "-e", f"trace={CALLS}")
    seen = asked(trace.read_text(), str(top.resolve()))
    assert len(told) > 100, "three saves and a rotation are more than that"
    assert {one.split()[0] for one in told} == {
        "mkdir", "rmdir", "open", "write", "fsync", "rename", "link", "unlink"
    }  # fmt: skip
    assert seen == told
