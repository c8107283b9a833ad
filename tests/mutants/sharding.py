"""Defects of sharded saving, of reading in part, and of loading in any layout."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PLACEMENT = "tests/property/test_placement.py"
PARTS = "tests/gang/test_reading_in_part.py"
FSDP = "tests/process/test_fsdp.py -k moments"
FLAT = "tests/property/test_flat_shards.py"
ZERO = "tests/unit/state/test_zero.py"
UPDATES = "tests/unit/strategies/test_engine_updates.py"
CONFIG = "tests/unit/strategies/test_deepspeed_config.py"
RESHARD = "tests/process/test_zero_resharding.py"
OPTIMIZER = "tests/unit/state/test_optimizer.py"

MUTANTS = [
    Mutant(
        "a chunk of a partial read is not proved",
        "resilient/vault/reading/bulk.py",
        "        if here < last:\n            return\n",
        "        return\n",
        PARTS,
    ),
    Mutant(
        "only the first chunk of a run is proved",
        "resilient/vault/reading/bulk.py",
        "        while self._at < stop:\n",
        "        while self._at < min(stop, CHUNK_BYTES):\n",
        PARTS,
    ),
    Mutant(
        "a rank reads whole files",
        "resilient/vault/reading/read.py",
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
        "resilient/state/shares.py",
        "        if not spec.size_bytes:\n",
        "        if False:\n",
        f"{PLACEMENT} -k empty_sharded",
    ),
    Mutant(
        "a box is filled from the wrong place of its target",
        "resilient/state/boxes.py",
        "region.offsets[axis] - self.region.offsets[axis], count)",
        "0, count)",
        PLACEMENT,
    ),
    Mutant(
        "the live shard is not filled in place",
        "resilient/state/landing.py",
        "        is_there = entry.name in self._live or isinstance(like, FlatShard)\n",
        "        is_there = isinstance(like, FlatShard)\n",
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
        "groups that come later are not named",
        "resilient/state/optimizer.py",
        "        if len(held) == len(self._parameters) and all(",
        "        if self._parameters or all(",
        OPTIMIZER,
    ),
    Mutant(
        "a parameter that took another's place is not looked for",
        "resilient/state/optimizer.py",
        " and all(map(is_, held, self._parameters)):",
        ":",
        OPTIMIZER,
    ),
    Mutant(
        "of groups that come later nobody knows where their state will lie",
        "resilient/state/optimizer.py",
        "        if group_sizes(self._optimizer) != self._sizes:\n",
        "        if False:\n",
        OPTIMIZER,
    ),
    Mutant(
        "a group that nobody reduces is left out without a word",
        "resilient/state/optimizer.py",
        '        if group["params"] and not names[number]:\n',
        "        if False:\n",
        "tests/unit/state/test_zero.py",
    ),
    Mutant(
        "a group that comes later is not cut into stages",
        "resilient/state/staged.py",
        "        groups = self._optimizer.param_groups[len(self._groups) :]\n",
        "        groups = [] if self._groups else self._optimizer.param_groups\n",
        "tests/unit/state/test_staged.py",
    ),
    Mutant(
        "ranks under FSDP keep running statistics of their own",
        "resilient/strategies/fsdp.py",
        "        model.register_forward_pre_hook(begin_with_rank_0)\n",
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
        "        broadcast([*model.parameters(), *model.buffers()])\n",
        "        pass\n",
        FSDP,
    ),
    Mutant(
        "ranks evaluate different numbers of batches of a model that they compute together",
        "resilient/train/evaluation/evaluate.py",
        " if self.in_step else 0\n",
        " if False else 0\n",
        FSDP,
    ),
    Mutant(
        "a run of elements loses the row that it ends in",
        "resilient/format/regions.py",
        "    return boxes + _in_row(shape, last, 0, stop - last * row)\n",
        "    return boxes\n",
        FLAT,
    ),
    Mutant(
        "boxes of a run all begin at its first element",
        "resilient/state/placement.py",
        "        place += region.size\n",
        "",
        FLAT,
    ),
    Mutant(
        "parameters of which a rank holds nothing look tied",
        "resilient/state/flat.py",
        "memory if memory.numel() else memory.new_empty(1)[:0]",
        "memory",
        FLAT,
    ),
    Mutant(
        "a partition is loaded beside its memory",
        "resilient/state/landing.py",
        "        if not is_there or like.dtype != dtype:\n",
        "        if True:\n",
        FLAT,
    ),
    Mutant(
        "parameters of a partition count their steps together",
        "resilient/state/zero.py",
        "        return value.detach().clone()\n",
        "        return value\n",
        ZERO,
    ),
    Mutant(
        "counts that differ within a partition become the first",
        "resilient/state/zero.py",
        "        if value != values[0]:\n",
        "        if False:\n",
        ZERO,
    ),
    Mutant(
        "moments of a parameter without any are left from before",
        "resilient/state/zero.py",
        "                    room.zero_()  # what",
        "                    pass  # what",
        ZERO,
    ),
    Mutant(
        "a partition is copied from the wrong place in its line",
        "resilient/state/zero_homes.py",
        "narrow(0, self.offset, self.count)",
        "narrow(0, 0, self.count)",
        ZERO,
    ),
    Mutant(
        "padding is stored as if it were state",
        "resilient/state/zero_homes.py",
        "    return start, min(length, one.ds_numel - start)\n",
        "    return start, length\n",
        RESHARD,
    ),
    Mutant(
        "half-precision weights stay what they were before a load",
        "resilient/state/zero.py",
        "        refresh(self._engine)\n",
        "        pass\n",
        RESHARD,
    ),
    Mutant(
        "DeepSpeed divides a loss by its micro-batches once more",
        "resilient/strategies/deepspeed.py",
        "scale_wrt_gas=False",
        "scale_wrt_gas=True",
        UPDATES,
    ),
    Mutant(
        "every backward pass under DeepSpeed ends a step",
        "resilient/strategies/deepspeed.py",
        "        engine.set_gradient_accumulation_boundary(False)",
        "        engine.set_gradient_accumulation_boundary(True)",
        UPDATES,
    ),
    Mutant(
        "the norm under DeepSpeed is that of the step before",
        "resilient/strategies/deepspeed.py",
        "        self._norm = torch.zeros(())\n        return self._norm\n",
        "        return self._norm.clone()\n",
        UPDATES,
    ),
    Mutant(
        "contradictions of DeepSpeed's config are not looked for",
        "resilient/strategies/deepspeed_config.py",
        "    if wrong:\n",
        "    if False:\n",
        CONFIG,
    ),
    Mutant(
        "a batch is counted without the ranks in DeepSpeed's config",
        "resilient/strategies/deepspeed_config.py",
        "    batch = per_step * told.ranks\n",
        "    batch = per_step\n",
        CONFIG,
    ),
]
