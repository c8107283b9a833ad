"""Additional CA for this process alone, for clients that trust only the machine's CA bundle.

The AWS Common Runtime reads only the CA bundle of the machine. So the process gets its own mount
namespace, in which a copy covers the folder of that bundle.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from pathlib import Path

BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
_NEWNS, _BIND, _REC_PRIVATE = 0x00020000, 0x1000, 0x44000
"""``CLONE_NEWNS`` of sched.h; ``MS_BIND``, and ``MS_REC | MS_PRIVATE``, of mount(2)."""


class OwnTrust:
    """Copy of the machine's authorities that only this process sees.

    It must be made before the process has threads.

    Args:
        folder: Folder for the copy.
    """

    def __init__(self, folder: Path) -> None:
        self._is_own = BUNDLE.exists() and _bind(folder, BUNDLE.parent)

    def add(self, authority: str) -> None:
        """Also trust the authorities of a PEM file, if possible."""
        if self._is_own and authority:
            with BUNDLE.open("ab") as bundle:
                bundle.write(b"\n" + Path(authority).read_bytes())


def _bind(folder: Path, over: Path) -> bool:
    """Cover a folder with a copy, for this process; return False if that is not allowed."""
    if os.geteuid() != 0:
        return False
    copy = Path(tempfile.mkdtemp(dir=folder))
    shutil.copytree(over, copy, dirs_exist_ok=True, ignore_dangling_symlinks=True)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEWNS):
        return False
    nothing = ctypes.c_char_p(None)
    if libc.mount(nothing, b"/", nothing, ctypes.c_ulong(_REC_PRIVATE), nothing):
        return False
    paths = (os.fsencode(copy), os.fsencode(over))
    return libc.mount(*paths, nothing, ctypes.c_ulong(_BIND), nothing) == 0
