"""Defects that the enumeration of crash states must see."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DISK = "tests/crash/test_enumeration.py -k recorded_history"
OBJECTS = "tests/crash/test_enumeration.py -k object_store"
GIVES_UP = "tests/crash/test_enumeration.py -k gives_up"
MODEL = "tests/unit/testing/test_diskstates.py"

SETTLING = "tests/crash/test_settling.py"
LINES_CUT = "tests/gang/test_lines_cut.py"

MUTANTS = [
    Mutant(
        "what a killed process left is not settled",
        "resilient/storage/local.py",
        ("            for folder in parent_dirs(self._files, self._root):\n"),
        "            for folder in ():\n",
        DISK,
    ),
    Mutant(
        "a life builds on what is not settled",
        "resilient/checkpoint/start_generation.py",
        ("        fsync_leftovers(context.store)\n"),
        "",
        DISK,
    ),
    Mutant(
        "a prune builds on what is not settled",
        "resilient/checkpoint/garbage_collection.py",
        ("    fsync_leftovers(store)\n"),
        "",
        SETTLING,
    ),
    Mutant(
        "the files of a commit in doubt are deleted",
        "resilient/checkpoint/save/persist.py",
        "    in_doubt = isinstance(error, StoreUnavailable | DeadlineExceeded | PeerFailed)\n",
        "    in_doubt = False\n",
        GIVES_UP,
    ),
    Mutant(
        "who lost the line deletes what may be committed",
        "resilient/checkpoint/save/persist.py",
        "    in_doubt = isinstance(error, StoreUnavailable | DeadlineExceeded | PeerFailed)\n",
        "    in_doubt = isinstance(error, StoreUnavailable | DeadlineExceeded)\n",
        LINES_CUT,
    ),
    Mutant(
        "a commit without an answer is believed",
        "resilient/checkpoint/commit.py",
        "        if not _is_there(store, key, data):\n",
        "        if False:\n",
        GIVES_UP,
    ),
    Mutant(
        "uploads of killed writers stay",
        "resilient/checkpoint/start_generation.py",
        "        sweep_uploads(new_context, generation.number)\n",
        "        pass\n",
        OBJECTS,
    ),
    Mutant(
        "a torn file is taken for a whole one",
        "resilient/checkpoint/restore/read.py",
        "    if digest_file(data) == entry.proof:\n",
        "    if len(data) == entry.size_bytes:\n",
        DISK,
    ),
    Mutant(
        "the mark comes before the commit",
        "resilient/checkpoint/save/persist.py",
        (
            "    commit(context.store, manifest, Signature(key, files) if key else None, "
            "context.token)\n"
        ),
        (
            "    from resilient.checkpoint.generations import mark_committed\n"
            "    mark_committed(context.store, job.about.checkpoint.generation)\n"
            "    commit(context.store, manifest, Signature(key, files) if key else None, "
            "context.token)\n"
        ),
        DISK,
    ),
    Mutant(
        "a rotation sweeps the save that other ranks have begun",
        "resilient/checkpoint/repository_scan.py",
        (
            "(\n"
            "                newest\n"
            "                and checkpoint < newest\n"
            "                and MANIFEST not in names\n"
            "                and"
        ),
        "(newest and checkpoint != newest and MANIFEST not in names and",
        DISK,
    ),
    Mutant(
        "the disk of the model keeps what was not synced",
        "resilient/testing/disk_model.py",
        "        elif node.content != node.durable:\n",
        "        elif False:\n",
        MODEL,
    ),
    Mutant(
        "the disk of the model keeps all names",
        "resilient/testing/disk_model.py",
        "        self.pending.append(change)\n",
        "        self.durable = self.names\n",
        MODEL,
    ),
    Mutant(
        "digests of disks add up, whatever is swapped",
        "resilient/testing/disk_model.py",
        "    return mixed * mixed\n",
        "    return mixed\n",
        MODEL,
    ),
    Mutant(
        "what is settled stays settled when it changes",
        "resilient/testing/disk_model.py",
        "            folder = found\n            folder.settled = None\n",
        "            folder = found\n",
        MODEL,
    ),
    Mutant(
        "a save takes a name that is taken in the near tier",
        "resilient/checkpoint/start_generation.py",
        "        above = _highest(context.store)\n",
        ("        above = max((one.generation for one in folders_of(context.store)), default=0)\n"),
        "tests/unit/checkpoint/test_tiers.py -k nobody_knows",
    ),
    Mutant(
        "a promotion commits before it carries, and the power goes",
        "resilient/checkpoint/promotion.py",
        "    put_bytes = _carry_each(tiers, manifest, here, fence, beat)\n",
        "    put_manifest(tiers.durable, key, data)\n"
        "    put_bytes = _carry_each(tiers, manifest, here, fence, beat)\n",
        DISK,
    ),
]
