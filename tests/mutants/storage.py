"""Defects of local and fsspec stores, of retries, and of test stores and the disk model."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "put does not sync the content of a file",
        "resilient/storage/local.py",
        "            self._sync(handle.sync, key)\n",
        "",
        "tests/crash/test_power_loss.py",
    ),
    Mutant(
        "put does not sync the folders",
        "resilient/storage/local.py",
        (
            "            with suppress(FileNotFoundError):\n"
            "                self._sync(lambda path=parent: self._files.sync_folder(path), key)  # type: ignore[misc]\n"
        ),
        "            pass\n",
        "tests/crash/test_power_loss.py",
    ),
    Mutant(
        "put syncs only the folder of the file, not the parents",
        "resilient/storage/local.py",
        "        for parent in (folder, *folder.parents):\n",
        "        for parent in (folder,):\n",
        "tests/crash/test_power_loss.py",
    ),
    Mutant(
        "put does not sync the parents of a new root",
        "resilient/storage/local.py",
        "        self._sync_root_path(key)\n",
        "",
        "tests/crash/test_power_loss.py",
    ),
    Mutant(
        "delete is not synced",
        "resilient/storage/local.py",
        "                self._sync(lambda: self._files.sync_folder(file.parent), key)\n",
        "                pass\n",
        "tests/crash/test_power_loss.py",
    ),
    Mutant(
        "all writers use the same temporary file name",
        "resilient/storage/local.py",
        '        temporary = folder / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"\n',
        '        temporary = folder / f"{TEMPORARY}object"\n',
        "tests/contract/test_local_store.py",
        promise="Stores",
    ),
    Mutant(
        "put syncs the folder before the rename",
        "resilient/storage/local.py",
        (
            "            self._files.replace(temporary, final)\n"
            "            undo.pop_all()\n"
            "            self._sync_folders(final.parent, key)\n"
        ),
        (
            "            self._sync_folders(final.parent, key)\n"
            "            self._files.replace(temporary, final)\n"
            "            undo.pop_all()\n"
        ),
        "tests/crash/test_power_loss.py",
    ),
    Mutant(
        "an exclusive create replaces an existing file",
        "resilient/storage/local.py",
        "            self._files.link(temporary, final)\n",
        "            self._files.replace(temporary, final)\n",
        "tests/contract/test_local_store.py",
        promise="Stores",
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
        (
            "            return\n"
            "            kind = StoreFull if kind_of(error) is StoreFull else StoreError\n"
        ),
        "tests/crash/test_power_loss.py",
    ),
    Mutant(
        "a short write is not continued",
        "resilient/storage/local.py",
        "    while view.nbytes:\n        written_bytes = handle.write(view)\n",
        "    if view.nbytes:\n        written_bytes = handle.write(view)\n",
        "tests/unit/storage/test_local_files.py",
        promise="P2",
    ),
    Mutant(
        "fsync is never called",
        "resilient/storage/posix.py",
        "        os.fsync(self._descriptor)\n",
        "        pass\n",
        "tests/unit/storage/test_local_files.py",
        promise="P2",
    ),
    Mutant(
        "a retried create accepts any existing object as its own",
        "resilient/storage/retry.py",
        "if not (unanswered and self._has_content(key, data)):",
        "if not unanswered:",
        "tests/unit/storage/test_retrying_deadline.py",
        promise="Stores",
    ),
    Mutant(
        "the memory store creates without the lock",
        "resilient/storage/fsspec_store.py",
        "    with MEMORY_LOCK:\n        if filesystem",
        "    if True:\n        if filesystem",
        "tests/unit/storage/test_fsspec_calls.py",
        promise="Stores",
    ),
    Mutant(
        "the listing cache of fsspec is enabled",
        "resilient/storage/fsspec_connect.py",
        '_UNCACHED = {"use_listings_cache": False}',
        '_UNCACHED = {"use_listings_cache": True}',
        "tests/unit/storage/test_fsspec_calls.py",
        promise="Stores",
    ),
    Mutant(
        "except Exception swallows a crash of the fault store",
        "resilient/testing/fault_store.py",
        "class Crash(BaseException):",
        "class Crash(Exception):",
        "tests/unit/testing/test_faulty_store.py",
        promise="Crash sweep",
    ),
    Mutant(
        "the fault store works after its process crashed",
        "resilient/testing/fault_store.py",
        "            self._dead = True\n",
        "            pass\n",
        "tests/unit/testing/test_faulty_store.py",
        promise="Crash sweep",
    ),
    Mutant(
        "s3fs waits without a deadline",
        "resilient/storage/fsspec_connect.py",
        '        bound_requests(filesystem, timeouts["read_timeout"])\n',
        "        pass\n",
        "tests/s3/test_s3_faults.py -k endless",
    ),
    Mutant(
        "ranges of a large object are joined at the wrong offset",
        "resilient/storage/transfer.py",
        "range(len(first_bytes), size_bytes, parts.part_bytes)",
        "range(0, size_bytes, parts.part_bytes)",
        "tests/s3/test_s3_contract.py -k in_parts",
        promise="S3",
    ),
    Mutant(
        "a create on gs:// accepts an object of another writer",
        "resilient/storage/fsspec_store.py",
        ("        if metadata.get(_WRITER) != token:\n            raise\n"),
        "        del metadata\n",
        "tests/unit/storage/test_cloud_options.py",
        promise="Stores",
    ),
    Mutant(
        "a create on az:// overwrites",
        "resilient/storage/fsspec_store.py",
        "overwrite=False, retry_total=0",
        "overwrite=True, retry_total=0",
        "tests/unit/storage/test_cloud_options.py",
        promise="Stores",
    ),
    Mutant(
        "links out of a folder are followed",
        "resilient/storage/folder.py",
        "        if not self._single and not _is_inside(",
        "        if False and not _is_inside(",
        "tests/unit/storage/test_folder.py -k links",
        promise="P9",
    ),
    Mutant(
        "an error of another thread is lost",
        "resilient/storage/transfer.py",
        "    if queue.failed:\n",
        "    if False:\n",
        "tests/unit/storage/test_pool.py tests/unit/checkpoint/test_write.py",
    ),
    Mutant(
        "threads continue after an error",
        "resilient/storage/transfer.py",
        "return None if self.failed else (next(self._pending),)",
        "return (next(self._pending),)",
        "tests/unit/storage/test_pool.py tests/unit/checkpoint/test_write.py",
    ),
    Mutant(
        "an error is raised while other threads still write",
        "resilient/storage/transfer.py",
        "        thread.join()\n",
        "        pass\n",
        "tests/unit/storage/test_pool.py tests/unit/checkpoint/test_write.py",
    ),
    Mutant(
        "the last error is raised instead of the first",
        "resilient/storage/transfer.py",
        "queue.failed[min(queue.failed)]",
        "queue.failed[max(queue.failed)]",
        "tests/unit/storage/test_pool.py tests/unit/checkpoint/test_write.py",
    ),
    Mutant(
        "a disk error counts as a file system without direct writes",
        "resilient/storage/posix.py",
        "            if error.errno not in _NO_DIRECT_IO:\n",
        "            if False:\n",
        "tests/unit/storage/test_handle.py",
    ),
    Mutant(
        "large files go through the page cache",
        "resilient/storage/posix.py",
        "        if not may_be or len(data) < _DIRECT_BYTES_MIN:\n",
        "        if may_be or len(data) < _DIRECT_BYTES_MIN:\n",
        "tests/unit/storage/test_handle.py",
    ),
    Mutant(
        "files of a killed process are not synced",
        "resilient/storage/local.py",
        "            for folder in parent_dirs(self._files, self._root):\n",
        "            for folder in ():\n",
        "tests/crash/test_enumeration.py -k recorded_history",
    ),
    Mutant(
        "the disk model keeps content that was not synced",
        "resilient/testing/disk_model.py",
        "        elif node.content != node.durable:\n",
        "        elif False:\n",
        "tests/unit/testing/test_diskstates.py",
        promise="Crash sweep",
    ),
    Mutant(
        "the disk model keeps all names",
        "resilient/testing/disk_model.py",
        "        self.pending.append(change)\n",
        "        self.durable = self.names\n",
        "tests/unit/testing/test_diskstates.py",
        promise="Crash sweep",
    ),
    Mutant(
        "the disk model gives equal digests to swapped disks",
        "resilient/testing/disk_model.py",
        "    return mixed * mixed\n",
        "    return mixed\n",
        "tests/unit/testing/test_diskstates.py",
        promise="Crash sweep",
    ),
    Mutant(
        "the disk model calls a changed folder synced",
        "resilient/testing/disk_model.py",
        ("            folder = node\n            folder.settled = None\n"),
        "            folder = node\n",
        "tests/unit/testing/test_diskstates.py",
        promise="Crash sweep",
    ),
    Mutant(
        "bytes are copied to the wrong buffer",
        "resilient/storage/transfer.py",
        "piece[max(begin - first, 0) : stop - first]",
        "piece[max(begin - first, 0) : stop]",
        "tests/unit/storage/test_room_for_reads.py",
        promise="P6",
    ),
]
