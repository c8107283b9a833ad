"""Defects of the stores."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "what a web server sends whole is taken for the part that was asked for",
        "resilient/storage/folder.py",
        "                if whole is not None:",
        "                if False:",
        "tests/cli/test_http_places.py -k sends_parts_or_not",
    ),
    Mutant(
        "a store takes the whole for a part",
        "resilient/storage/fsspec_store.py",
        "                return data if len(data) <= length else data[start : start + length]",
        "                return data",
        "tests/cli/test_http_places.py -k store_takes",
    ),
    Mutant(
        "the content is not synced",
        "resilient/storage/local.py",
        "            self._sync(handle.sync, key)\n",
        "",
        "tests/crash/test_power_loss.py",
    ),
    Mutant(
        "the folders are not synced",
        "resilient/storage/local.py",
        (
            "            with suppress(FileNotFoundError):\n"
            "                self._sync(lambda path=parent: "
            "self._files.sync_folder(path), key)  # type: ignore[misc]\n"
        ),
        "            pass\n",
        "tests/crash/test_power_loss.py",
    ),
    Mutant(
        "only the file's own folder is synced",
        "resilient/storage/local.py",
        "        for parent in (folder, *folder.parents):\n",
        "        for parent in (folder,):\n",
        "tests/crash/test_power_loss.py",
    ),
    Mutant(
        "the way to a new root is not synced",
        "resilient/storage/local.py",
        "        self._anchor(key)\n",
        "",
        "tests/crash/test_power_loss.py",
    ),
    Mutant(
        "a delete is not synced",
        "resilient/storage/local.py",
        "                self._sync(lambda: self._files.sync_folder(file.parent), key)\n",
        "                pass\n",
        "tests/crash/test_power_loss.py",
    ),
    Mutant(
        "all writers use one temporary name",
        "resilient/storage/local.py",
        '        temporary = folder / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"\n',
        '        temporary = folder / f"{TEMPORARY}object"\n',
        "tests/contract/test_local_store.py",
    ),
    Mutant(
        "the rename comes after the sync of the folder",
        "resilient/storage/local.py",
        "            self._files.replace(temporary, final)\n            undo.pop_all()\n            self._sync_folders(final.parent, key)\n",
        "            self._sync_folders(final.parent, key)\n            self._files.replace(temporary, final)\n            undo.pop_all()\n",
        "tests/crash/test_power_loss.py",
    ),
    Mutant(
        "an exclusive create replaces",
        "resilient/storage/local.py",
        "            self._files.link(temporary, final)\n",
        "            self._files.replace(temporary, final)\n",
        "tests/contract/test_local_store.py",
    ),
    Mutant(
        "a failed fsync is retried and trusted",
        "resilient/storage/local.py",
        "            kind = StoreFull if kind_of(error) is StoreFull else StoreError\n",
        "            kind = kind_of(error)\n",
        "tests/crash/test_power_loss.py",
    ),
    Mutant(
        "a failed fsync is ignored",
        "resilient/storage/local.py",
        "            kind = StoreFull if kind_of(error) is StoreFull else StoreError\n",
        "            return\n            kind = StoreFull if kind_of(error) is StoreFull else StoreError\n",
        "tests/crash/test_power_loss.py",
    ),
    Mutant(
        "a write is never short",
        "resilient/storage/local.py",
        "    while view.nbytes:\n        written = handle.write(view)\n",
        "    if view.nbytes:\n        written = handle.write(view)\n",
        "tests/unit/storage/test_local_files.py",
    ),
    Mutant(
        "the real fsync is skipped",
        "resilient/storage/posix.py",
        "        os.fsync(self._descriptor)\n",
        "        pass\n",
        "tests/unit/storage/test_local_files.py",
    ),
    Mutant(
        "files are created with mode 0600",
        "resilient/storage/posix.py",
        "os.open(path, flags, 0o666)",
        "os.open(path, flags, 0o600)",
        "tests/unit/storage/test_local_files.py",
    ),
    Mutant(
        "everything is retried",
        "resilient/storage/retry.py",
        "            except StoreUnavailable as error:\n                tries",
        "            except (StoreUnavailable, KeyNotFound) as error:\n                tries",
        "tests/unit/storage/test_retrying_deadline.py",
    ),
    Mutant(
        "any taken key is our own",
        "resilient/storage/retry.py",
        "if not (unanswered and self._holds(key, data)):",
        "if not unanswered:",
        "tests/unit/storage/test_retrying_deadline.py",
    ),
    Mutant(
        "memory creates without the lock",
        "resilient/storage/fsspec_store.py",
        "    with MEMORY_LOCK:\n        if filesystem",
        "    if True:\n        if filesystem",
        "tests/unit/storage/test_fsspec_calls.py",
    ),
    Mutant(
        "the listing cache is on",
        "resilient/storage/fsspec_connect.py",
        '_UNCACHED = {"use_listings_cache": False}',
        '_UNCACHED = {"use_listings_cache": True}',
        "tests/unit/storage/test_fsspec_calls.py",
    ),
    Mutant(
        "a crash of the faults is swallowed",
        "resilient/testing/fault_store.py",
        "class Crash(BaseException):",
        "class Crash(Exception):",
        "tests/unit/testing/test_faulty_store.py",
    ),
    Mutant(
        "a crashed process lives on",
        "resilient/testing/fault_store.py",
        "            self._dead = True\n",
        "            pass\n",
        "tests/unit/testing/test_faulty_store.py",
    ),
    Mutant(
        "a folder that can never be made is tried for a minute",
        "resilient/storage/local.py",
        "        if was_there and folder.parent.is_dir():\n",
        "        if False:\n",
        "tests/unit/storage/test_local_files.py -k never_be_made",
    ),
    Mutant(
        "a store that is silent is told of at each try",
        "resilient/storage/retry.py",
        "            self._silent_since_seconds = started_seconds\n",
        "            pass\n",
        "tests/unit/storage/test_retrying_deadline.py",
    ),
    Mutant(
        "a store that answers late is called silent",
        "resilient/storage/retry.py",
        " or spent_seconds < _TELL_AFTER_SECONDS",
        "",
        "tests/unit/storage/test_retrying_deadline.py",
    ),
]
