"""A local store as slow as a test needs it, in every process that has this folder on its path.

HELD_FOLDER: puts of shards whose key begins with HELD_PREFIX leave a note there and wait until
the file `go` is there. Reads of shards are noted in `reads`, with the process that read.
"""

import os
import time
from pathlib import Path

from resilient.storage.local import LocalStore

_folder = Path(os.environ["HELD_FOLDER"])
_prefix = os.environ.get("HELD_PREFIX", "nothing")
_put, _put_new, _get = LocalStore.put, LocalStore.put_new, LocalStore.get


def _hold(key):
    if key.startswith(_prefix) and key.endswith(".safetensors"):
        (_folder / f"held-{key.replace('/', '-')}").write_text(str(os.getpid()))
        while not (_folder / "go").exists():
            time.sleep(0.01)


def _slow_put(self, key, data):
    _hold(key)
    return _put(self, key, data)


def _slow_put_new(self, key, data):
    _hold(key)
    return _put_new(self, key, data)


def _noted_get(self, key):
    if key.endswith(".safetensors"):
        with (_folder / "reads").open("a") as file:
            file.write(f"{os.getpid()} {key}\n")
    return _get(self, key)


LocalStore.put, LocalStore.put_new, LocalStore.get = _slow_put, _slow_put_new, _noted_get
