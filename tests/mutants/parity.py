"""Defects of parity, of repair, and of what is believed on the way."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CODE = "tests/unit/format/test_parity.py"
REPAIR = "tests/unit/checkpoint/test_repair.py tests/unit/checkpoint/test_repair_from_copies.py"
SWEEP = "tests/crash/test_repair_sweep.py"
GANG = "tests/gang/test_mending.py"
REFER = "tests/unit/checkpoint/test_refer_with_parity.py"

MUTANTS = [
    Mutant(
        "another polynomial is the field's",
        "resilient/format/parity.py",
        "POLYNOMIAL = 0x11D",
        "POLYNOMIAL = 0x12D",
        CODE,
    ),
    Mutant(
        "all rows of the code are alike",
        "resilient/format/parity.py",
        "invert((255 - row) ^ column)",
        "invert(255 ^ column)",
        CODE,
    ),
    Mutant(
        "only the first piece of a file is summed",
        "resilient/format/parity.py",
        "    for start in range(0, len(total), _BLOCK_BYTES):",
        "    for start in range(0, min(len(total), _BLOCK_BYTES), _BLOCK_BYTES):",
        CODE,
    ),
    Mutant(
        "parity ends where the shortest file ends",
        "resilient/format/parity.py",
        "        size_bytes = max(named[name].size_bytes for name in group.files)",
        "        size_bytes = min(named[name].size_bytes for name in group.files)",
        CODE,
    ),
    Mutant(
        "what is computed back is not proved",
        "resilient/checkpoint/restore/reconstruct.py",
        "        if digest_bytes(result) == entry.chunks[number]:",
        "        if True:",
        REPAIR,
    ),
    Mutant(
        "what another place holds is not proved",
        "resilient/checkpoint/restore/reconstruct.py",
        "            if len(data) == length and digest_bytes(data) == entry.chunks[number]:",
        "            if len(data) == length:",
        REPAIR,
    ),
    Mutant(
        "damaged parity counts as whole",
        "resilient/checkpoint/restore/reconstruct.py",
        "    hit = sum(number in damaged.get(share, ()) for share in group.shares)",
        "    hit = sum(number in damaged.get(share, ()) for share in group.files)",
        REPAIR,
    ),
    Mutant(
        "losses are counted by file and not by chunk",
        "resilient/checkpoint/restore/reconstruct.py",
        "    hit = sum(number in damaged.get(share, ()) for share in group.shares)",
        "    hit = sum(bool(damaged.get(share, ())) for share in group.shares)",
        REPAIR,
    ),
    Mutant(
        "a repair brings back what was let go",
        "resilient/checkpoint/repair.py",
        "        if not undelete:\n            raise _gone(store, checkpoint) from error\n",
        "",
        REPAIR,
    ),
    Mutant(
        "what was let go comes back with holes",
        "resilient/checkpoint/repair.py",
        "manifest is None or (plan.is_gone and not plan.is_whole)",
        "manifest is None",
        REPAIR,
    ),
    Mutant(
        "a manifest of a fork is believed",
        "resilient/checkpoint/repair.py",
        "            if _same_life(store, other, checkpoint.generation):",
        "            if True:",
        REPAIR,
    ),
    Mutant(
        "the manifest is put before the files that it names",
        "resilient/checkpoint/repair.py",
        "key=lambda repair: repair.file == MANIFEST)",
        "key=lambda repair: repair.file != MANIFEST)",
        SWEEP,
    ),
    Mutant(
        "a file is emptied before it is mended",
        "resilient/checkpoint/repair.py",
        "    store.put(key, data)\n",
        "    store.delete(key)\n    store.put(key, data)\n",
        SWEEP,
    ),
    Mutant(
        "a setting is not heard: damage is mended although nobody wants it",
        "resilient/checkpoint/context.py",
        "self.signing, self.limits.repair_on_restore, places)",
        "self.signing, True, places)",
        GANG,
    ),
    Mutant(
        "the look for room forgets the parity",
        "resilient/checkpoint/save/dedup.py",
        "        return sum(sizes) + parity_bytes(sizes, self.parity)",
        "        return sum(sizes)",
        GANG,
    ),
    Mutant(
        "a copy that cannot be put fails the save",
        "resilient/checkpoint/save/persist.py",
        ("    copied = capture_failure(lambda: copy_manifest(context.store, checkpoint))"),
        "    copied = copy_manifest(context.store, checkpoint)",
        GANG,
    ),
    Mutant(
        "lost parity holds rotations",
        "resilient/checkpoint/repository_scan.py",
        ("        if file.name not in needed:\n            continue\n"),
        "",
        REPAIR,
    ),
    Mutant(
        "a file is referred to without what protects it",
        "resilient/checkpoint/save/dedup.py",
        "    origins |= dict.fromkeys(name for group in groups for name in group.shares)\n",
        "    groups = ()\n",
        REFER,
    ),
    Mutant(
        "a group with holes is relied on",
        "resilient/checkpoint/save/dedup.py",
        (
            "        groups = [group for group in groups if is_there(store, "
            "group.shares, bounds.lengths)]\n"
        ),
        "",
        REFER,
    ),
    Mutant(
        "what nothing protects is referred to",
        "resilient/checkpoint/save/dedup.py",
        "[match for match in matches if match.place.file in safe]",
        "matches",
        REFER,
    ),
    Mutant(
        "what was computed back in memory is referred to in the store",
        "resilient/checkpoint/save/dedup.py",
        " and name not in proved.mended:",
        ":",
        GANG,
    ),
]
