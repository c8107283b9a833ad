"""Defects of doing several things at once."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

POOL = "tests/unit/storage/test_pool.py"
WRITE = "tests/unit/checkpoint/test_write.py"
BULK = "tests/unit/checkpoint/test_bulk.py"
RECALL = "tests/unit/checkpoint/test_recall.py"
BUNDLES = "tests/unit/state_dict/test_bundles.py"
DRAFTS = "tests/unit/state_dict/test_drafts.py"
COVERS = "tests/property/test_covers.py"
COMMS = "tests/contract/test_comms.py"
SCALE = "tests/simulation/test_scale.py"

MUTANTS = [
    Mutant(
        "an error of another thread is lost",
        "resilient/storage/transfer.py",
        "    if lanes.failed:\n",
        "    if False:\n",
        f"{POOL} {WRITE}",
    ),
    Mutant(
        "threads go on after an error",
        "resilient/storage/transfer.py",
        "return None if self.failed else (next(self._left),)",
        "return (next(self._left),)",
        f"{POOL} {WRITE}",
    ),
    Mutant(
        "an error is raised while others still write",
        "resilient/storage/transfer.py",
        "        thread.join()\n",
        "        pass\n",
        f"{POOL} {WRITE}",
    ),
    Mutant(
        "the last error is raised in place of the first",
        "resilient/storage/transfer.py",
        "lanes.failed[min(lanes.failed)]",
        "lanes.failed[max(lanes.failed)]",
        f"{POOL} {WRITE}",
    ),
    Mutant(
        "a region that goes on in the next chunk is digested up to there",
        "resilient/format/digest.py",
        "                if last > end:\n                    break\n",
        "",
        "tests/unit/format/test_digest.py",
    ),
    Mutant(
        "a large file that became longer is whole",
        "resilient/checkpoint/restore/read.py",
        "    if size_bytes != entry.size_bytes:\n",
        "    if size_bytes < entry.size_bytes:\n",
        BULK,
    ),
    Mutant(
        "what is read once more is not proved",
        "resilient/checkpoint/verified_read.py",
        ("    except IntegrityError:\n        return read_into(store, key, start, room, prove)"),
        ("    except IntegrityError:\n        return read_into(store, key, start, room, print)"),
        BULK,
    ),
    Mutant(
        "a range that came short is believed",
        "resilient/checkpoint/restore/read.py",
        ("    if came < len(span.room):\n        raise"),
        "    if False:\n        raise",
        "tests/gang/test_reading_in_part.py",
    ),
    Mutant(
        "a large file is read as one range",
        "resilient/checkpoint/restore/read.py",
        "    step = _step(range_bytes)\n",
        "    step = _step(entry.size_bytes + CHUNK_BYTES)\n",
        BULK,
    ),
    Mutant(
        "a tensor lies where torch would not have laid it",
        "resilient/state_dict/load.py",
        "return None if tensor.data_ptr() % MEMORY_ALIGNMENT else tensor",
        "return tensor",
        BULK,
    ),
    Mutant(
        "memory is laid out without regard to the header",
        "resilient/checkpoint/restore/read.py",
        "new_memory(place.start - at, head_bytes - at)",
        "new_memory(place.start - at)",
        BULK,
    ),
    Mutant(
        "bytes that come anew are digested behind those that came before",
        "resilient/checkpoint/restore/read.py",
        "            self._running.take()\n        while",
        "        while",
        BULK,
    ),
    Mutant(
        "nobody is told of a range of a keeper's memory",
        "resilient/checkpoint/restore/memory_store.py",
        "                arrived(at, at + sum(map(len, pieces)))\n",
        "",
        RECALL,
    ),
    Mutant(
        "a range of a keeper's memory that does not fit ends the resume",
        "resilient/checkpoint/restore/memory_store.py",
        "    except (IntegrityError, OSError):\n        return False\n    return True\n",
        "    except OSError:\n        return False\n    return True\n",
        RECALL,
    ),
    Mutant(
        "an error of the disk is taken for a file system without direct writes",
        "resilient/storage/posix.py",
        "            if error.errno not in _NOT_DIRECTLY:\n",
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
        "a share is cut in the middle of its regions",
        "resilient/state_dict/planner.py",
        "    count = -(-piece.size_bytes // FILE_BYTES_MAX)\n",
        "    count = 4\n",
        BUNDLES,
    ),
    Mutant(
        "a region that no file should hold whole is not cut",
        "resilient/state_dict/planner.py",
        "for part in _cut_if_huge(piece)]",
        "for part in [piece]]",
        BUNDLES,
    ),
    Mutant(
        "a part is laid out as one of other shapes was",
        "resilient/state_dict/planner.py",
        "        if known is None or known[:2] != (world, shapes):",
        "        if known is None:",
        DRAFTS,
    ),
    Mutant(
        "a part that is planned already is saved as it was then",
        "resilient/state_dict/planner.py",
        "        return [plan.of(part.tensors) for plan in known[2]]",
        "        self._last = getattr(self, '_last', {})\n"
        "        return self._last.setdefault(\n"
        "            part.name, [plan.of(part.tensors) for plan in known[2]]\n        )",
        DRAFTS,
    ),
    Mutant(
        "forked children share the memory that saves are staged in",
        "resilient/storage/shared_memory.py",
        "mapped.madvise(mmap.MADV_DONTFORK)",
        "mapped.madvise(mmap.MADV_NORMAL)",
        "tests/unit/storage/test_staging_memory.py",
    ),
    Mutant(
        "each save is staged in memory of its own, and what there was is held",
        "resilient/storage/shared_memory.py",
        (
            "        if buffer is None or len(buffer) < size_bytes:\n"
            "            buffer = self._held[name] = private(size_bytes)\n"
        ),
        '        held = self._held[f"{name} {len(self._held)}"] = private(size_bytes)\n',
        "tests/gang/test_field_bugs_elastic.py -k 104143",
    ),
    Mutant(
        "what is staged goes where an arena's memory was once",
        "resilient/state_dict/staging.py",
        "        self._targets.pop(name, None)\n",
        "",
        DRAFTS,
    ),
    Mutant(
        "what begins at the same address is the same tensor",
        "resilient/state_dict/flatten.py",
        "                if _is_same(self.tensors[known], value):",
        "                if known:",
        DRAFTS,
    ),
    Mutant(
        "a box that lies twice makes up for a hole",
        "resilient/format/regions.py",
        "    return not any(counts.values())\n",
        "    return not sum(counts.values())\n",
        COVERS,
    ),
    Mutant(
        "an axis is left out because one box is as long as the tensor",
        "resilient/format/regions.py",
        "if any(box.lengths[axis] != extent for box in boxes)",
        "if all(box.lengths[axis] != extent for box in boxes)",
        COVERS,
    ),
    Mutant(
        "boxes cut on many axes take memory for two to their number",
        "resilient/format/regions.py",
        "len(cut) <= _CUT_AXES_MAX and ",
        "",
        COVERS,
    ),
    Mutant(
        "regions of many ranks are compared in pairs",
        "resilient/format/regions.py",
        "<= len(boxes):\n        return _corners_cancel",
        "<= 0:\n        return _corners_cancel",
        COVERS,
    ),
    Mutant(
        "the coordinator asks for what each rank has shown by itself",
        "resilient/distributed/torch_kv_store.py",
        "self._call(self.store.multi_get, list(keys))",
        "[self._call(self.store.get, key) for key in keys]",
        SCALE,
    ),
    Mutant(
        "what ranks have shown stays on the board",
        "resilient/distributed/coordination.py",
        "        self._forget_mine(topic)\n        return json.loads",
        "        return json.loads",
        COMMS,
    ),
    Mutant(
        "a ruling that was heard is lost with the board",
        "resilient/distributed/coordination.py",
        "        with suppress(PeerFailed):\n            self._board.remove(self.key",
        "        if topic:\n            self._board.remove(self.key",
        COMMS,
    ),
]
