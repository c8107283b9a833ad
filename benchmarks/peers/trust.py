"""Trust one more authority in this process alone, for clients that only ask the machine whom.

The AWS Common Runtime reads the machine's bundle and takes no other. So the process gets a mount
namespace of its own, in which a copy lies over the folder of that bundle.
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
    """The machine's authorities as only this process sees them; made before it has threads.

    Args:
        folder: for the copy.
    """

    def __init__(self, folder: Path) -> None:
        self._is_own = BUNDLE.exists() and _bind(folder, BUNDLE.parent)

    def add(self, authority: str) -> None:
        """Trust the authorities of a PEM file besides, where that is possible."""
        if self._is_own and authority:
            with BUNDLE.open("ab") as bundle:
                bundle.write(b"\n" + Path(authority).read_bytes())


def _bind(folder: Path, over: Path) -> bool:
    """Lay a copy of a folder over it, for this process; False where that is not allowed."""
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
