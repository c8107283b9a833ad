"""Defects of references: what is compared, what is trusted, and what may be deleted."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

REFER = "tests/unit/checkpoint/test_refer.py tests/unit/checkpoint/test_refer_and_read.py"
FAILED = "tests/unit/test_failed_saves.py"
ROTATE = "tests/unit/checkpoint/test_rotate_references.py"
RACES = "tests/crash/test_reference_races.py"
MACHINE = "tests/property/test_vault_machine.py"
SWEEP = "tests/crash/test_keeping_sweep.py -k anywhere"

MANIFEST_CHECKS = "resilient/format/manifest.py"
MODULE = "resilient/checkpoint/save/dedup.py"
ROTATION = "resilient/checkpoint/garbage_collection.py"
SCALE = "tests/simulation/test_scale.py"

MUTANTS = [
    Mutant(
        "rotation deletes what others refer to",
        "resilient/checkpoint/repository_scan.py",
        (
            "for checkpoint, name in self.stale()\n"
            "            if not self.needed.holds(checkpoint, name)\n"
            "        ]"
        ),
        "for checkpoint, name in self.stale()]",
        SWEEP,
    ),
    Mutant(
        "rotation deletes what others refer to, seen by any history",
        "resilient/checkpoint/repository_scan.py",
        (
            "for checkpoint, name in self.stale()\n"
            "            if not self.needed.holds(checkpoint, name)\n"
            "        ]"
        ),
        "for checkpoint, name in self.stale()]",
        MACHINE,
    ),
    Mutant(
        "only the line of descent keeps what it refers to",
        ROTATION,
        (
            "if MANIFEST in names\n"
            "        and (found.into or checkpoint not in found.plan.doomed)\n"
            "        and checkpoint > oldest"
        ),
        (
            "if checkpoint.generation > 1 and (found.into or checkpoint not in "
            "found.plan.doomed) and checkpoint > oldest"
        ),
        ROTATE,
    ),
    Mutant(
        "a manifest that cannot be read needs nothing",
        "resilient/checkpoint/repository_scan.py",
        "        if self.unknown is not None and checkpoint < self.unknown:",
        "        if False:",
        ROTATE,
    ),
    Mutant(
        "files go although tags stopped the rotation",
        ROTATION,
        "            return replace(plan, doomed=plan.doomed[:done],",
        "            break\n            plan = replace(plan, doomed=plan.doomed[:done],",
        ROTATE,
    ),
    Mutant(
        "nobody looks for a newer life before the files go",
        ROTATION,
        ("    if unneeded:\n        check_fence(store, generation, token)"),
        "    if unneeded:\n        pass",
        ROTATE,
    ),
    Mutant(
        "files go before the manifests",
        ROTATION,
        "    for done, checkpoint in enumerate(plan.doomed):\n",
        "    for checkpoint, name in found.unneeded():\n"
        "        store.delete(checkpoint.key(name))\n"
        "    for done, checkpoint in enumerate(plan.doomed):\n",
        SWEEP,
    ),
    Mutant(
        "references run in chains",
        MODULE,
        "replace(region, file=manifest.key(region.file))",
        'replace(region, file=manifest.checkpoint.key(region.file.rpartition("/")[2]))',
        REFER,
    ),
    Mutant(
        "bits are not compared",
        MODULE,
        "if place is not None and place.digest == region.digest:",
        "if place is not None:",
        REFER,
    ),
    Mutant(
        "dtypes are not compared",
        MODULE,
        "return tensor.name, tensor.dtype, tensor.shape, region.region",
        'return tensor.name, "", tensor.shape, region.region',
        REFER,
    ),
    Mutant(
        "what was not proved is referred to",
        MODULE,
        "            base.proved is None\n            or",
        "            base.proved is not False\n            or",
        REFER,
    ),
    Mutant(
        "what came from memory is taken for stored",
        MODULE,
        "if proved.manifest.key(name) not in recalled and name",
        "if name",
        REFER,
    ),
    Mutant(
        "a file that is gone is referred to",
        MODULE,
        "for match in matches if match.place.file in there]",
        "for match in matches]",
        REFER,
    ),
    Mutant(
        "a dead file is kept for the sake of a small part",
        MODULE,
        "if match.file in worth and match.place.file in worth]",
        "if match.file in worth]",
        REFER,
    ),
    Mutant(
        "a checkpoint refers to any number of folders",
        MODULE,
        "kept = [match for match in matches if origin_of(match.place.file) in few]",
        "kept = matches",
        REFER,
    ),
    Mutant(
        "one region that changed makes all of a file new",
        MODULE,
        "        region.start in changed[file.name]\n",
        "        changed[file.name]\n",
        REFER,
    ),
    Mutant(
        "a random state that nobody drew from makes each rank read the manifest of all",
        MODULE,
        (
            "        for region in tensor.regions\n"
            "        if region.size_bytes >= REFER_BYTES_MIN\n"
            "    )\n"
        ),
        ("        for region in tensor.regions\n    )\n"),
        SCALE,
    ),
    Mutant(
        "the next save forgets one that may be committed",
        "resilient/checkpoint_engine.py",
        ("self._bases = (DedupBase(pending), *self._bases)[:_BASES_MAX]"),
        "pass",
        FAILED,
    ),
    Mutant(
        "a manifest may refer to newer checkpoints",
        MANIFEST_CHECKS,
        "return manifest.format_version > 1 and origin < manifest.checkpoint",
        "return manifest.format_version > 1",
        REFER,
    ),
    Mutant(
        "a shared file is read whole",
        "resilient/format/partial_read.py",
        "        if tensor.name in boxes or origin_of(region.file)",
        "        if tensor.name in boxes",
        REFER,
    ),
    Mutant(
        "what is trained is digested only to see that it changed",
        "resilient/checkpoint/save/dedup.py",
        "        if region.digest or region.start in changed:",
        "        if region.digest:",
        REFER,
    ),
    Mutant(
        "a document is taken apart",
        MODULE,
        "    documents = {part.document for part in parts}",
        "    documents = set[str]()",
        REFER,
    ),
    Mutant(
        "what is left of a file is copied, whatever memory is left",
        "resilient/checkpoint/save/dedup.py",
        "length - taken_bytes <= room_bytes",
        "length > room_bytes",
        "tests/unit/checkpoint/test_refer.py -k shorter_copy",
    ),
    Mutant(
        "files are copied at once, whatever memory is left",
        "resilient/checkpoint/save/persist.py",
        "        at_once = min(at_once, copies_bytes_max // copied_bytes)\n",
        "        pass\n",
        "tests/unit/checkpoint/test_write.py -k as_memory",
    ),
    Mutant(
        "the keeper does not say what its bound has left",
        "resilient/checkpoint/daemon/session.py",
        "share.spare_bytes(used_bytes)",
        "None",
        "tests/gang/test_keeper_copies.py",
    ),
]
