"""Defects of sharded saving, of reading in part, and of loading in any layout."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PLACEMENT = "tests/property/test_placement.py"
PARTS = "tests/gang/test_reading_in_part.py"
FSDP = "tests/process/test_fsdp.py -k moments"
OPTIMIZER = "tests/unit/state/test_optimizer.py"

MUTANTS = [
    Mutant(
        "a chunk of a partial read is not proved",
        "resilient/vault/bulk.py",
        "        _prove(manifest, one, begin, stop)\n",
        "        pass\n",
        PARTS,
    ),
    Mutant(
        "only the first chunk of a run is proved",
        "resilient/vault/bulk.py",
        "    for first in range(begin // CHUNK_BYTES * CHUNK_BYTES, stop, CHUNK_BYTES):\n",
        "    for first in range(begin // CHUNK_BYTES * CHUNK_BYTES, stop, CHUNK_BYTES)[:1]:\n",
        PARTS,
    ),
    Mutant(
        "a rank reads whole files",
        "resilient/vault/read.py",
        "    touched = chunks_touched(_tensors(manifest, parts), boxes)\n",
        "    touched = {}\n",
        f"{PARTS} {PLACEMENT}",
    ),
    Mutant(
        "the last chunk that a span touches is left out",
        "resilient/format/extents.py",
        "last = (start + length - 1) // CHUNK_BYTES",
        "last = start // CHUNK_BYTES",
        f"{PARTS} {PLACEMENT}",
    ),
    Mutant(
        "bytes beside those that were read are given",
        "resilient/format/extents.py",
        "        if begin < 0 or begin + length > len(self.parts[index]):\n",
        "        if False:\n",
        PARTS,
    ),
    Mutant(
        "a span reads through any hole",
        "resilient/format/regions.py",
        "        if length > 1 and strides[axis] - reach >= hole:\n",
        "        if False:\n",
        PLACEMENT,
    ),
    Mutant(
        "replicas all write their shard",
        "resilient/state/shares.py",
        "_split(pieces, len(ranks), ranks.index(world.rank))",
        "_split(pieces, 1, 0)",
        PLACEMENT,
    ),
    Mutant(
        "a share is written with the offsets of its shard",
        "resilient/state/shares.py",
        "    offsets = tuple(map(sum, zip(piece.region.offsets, part.offsets, strict=True)))\n",
        "    offsets = piece.region.offsets\n",
        PLACEMENT,
    ),
    Mutant(
        "the first ranks get the smaller chunks",
        "resilient/state/placement.py",
        "    step = -(-length // ranks)\n",
        "    step = max(length // ranks, 1)\n",
        PLACEMENT,
    ),
    Mutant(
        "strided shards are taken for plain ones",
        "resilient/state/placement.py",
        "placement.split_factor if isinstance(placement, _StridedShard) else 1",
        "1",
        PLACEMENT,
    ),
    Mutant(
        "an empty sharded tensor is forgotten",
        "resilient/state/placement.py",
        "        return (Box(whole(tensor.shape), local),) if not any(coordinate) else ()\n",
        "        return ()\n",
        PLACEMENT,
    ),
    Mutant(
        "a box is filled from the wrong place of its target",
        "resilient/state/load.py",
        "part.offsets[axis] - region.offsets[axis], count)",
        "0, count)",
        PLACEMENT,
    ),
    Mutant(
        "the live shard is not filled in place",
        "resilient/state/landing.py",
        "        if entry.name not in self._live or like.dtype != dtype:\n",
        "        if True:\n",
        PLACEMENT,
    ),
    Mutant(
        "moments of sharded parameters are loaded whole",
        "resilient/state/optimizer.py",
        'return self._held.get(name) if place == "state" and kind != "step" else None',
        "return None",
        OPTIMIZER,
    ),
    Mutant(
        "ranks under FSDP keep running statistics of their own",
        "resilient/strategies/fsdp.py",
        "        model.register_forward_pre_hook(_align_buffers)\n",
        "",
        FSDP,
    ),
    Mutant(
        "gradients under FSDP are never reduced after an accumulation",
        "resilient/strategies/fsdp.py",
        "            sharded.set_requires_gradient_sync(requires_gradient_sync=True)\n",
        "            pass\n",
        FSDP,
    ),
    Mutant(
        "shards are cut from what each rank drew for itself",
        "resilient/strategies/fsdp.py",
        "            for tensor in [*model.parameters(), *model.buffers()]:\n",
        "            for tensor in []:\n",
        FSDP,
    ),
    Mutant(
        "ranks evaluate different numbers of batches of a model that they compute together",
        "resilient/train/evaluation.py",
        " if self.in_step else 0\n",
        " if False else 0\n",
        FSDP,
    ),
]
