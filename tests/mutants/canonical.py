"""Defects of canonical reduction: an order, a random number or a check that depends on ranks."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TREE = "tests/property/test_canonical_tree.py"
ONE = "tests/unit/train/test_reduction.py"
SUMS = "tests/unit/strategies/test_canonical_sums.py"
MANY = "tests/process/test_canonical.py -k any_number"
LOADERS = "tests/process/test_canonical.py -k loader"
SHARDS = "tests/process/test_canonical.py -k sharded"
PASSES = "resilient/train/canonical_reduction.py"

MUTANTS = [
    Mutant(
        "any two neighbours are joined",
        "resilient/strategies/canonical/tree_reduce.py",
        "or not is_power or left.start % (2 * half):",
        "or not is_power:",
        TREE,
    ),
    Mutant(
        "ranks cut gradients anywhere",
        "resilient/strategies/canonical/tree_reduce.py",
        "        cuts.append(max(cuts[-1], nearest))\n",
        "        cuts.append(int(wanted))\n",
        TREE,
    ),
    Mutant(
        "a gradient that is missing here adds nothing",
        "resilient/strategies/canonical/tree_reduce.py",
        "        left.add_(0.0) if left is not None and right is None else left\n",
        "        left\n",
        SUMS,
    ),
    Mutant(
        "the norm of a span is taken for the norm of all",
        "resilient/strategies/canonical/updates.py",
        "        if self.reducer.ranks > 1:\n            dist.all_reduce(norms)\n",
        "",
        SHARDS,
    ),
    Mutant(
        "micro-batches draw from one stream",
        PASSES,
        "            self._seed(step, leaf)\n",
        "",
        LOADERS,
    ),
    Mutant(
        "samples are drawn from one stream",
        "resilient/train/data/sampler.py",
        "KeyedDataset(dataset, always=is_canonical(args))",
        "KeyedDataset(dataset)",
        MANY,
    ),
    Mutant(
        "a buffer may change after the first step",
        PASSES,
        "            before.require_same(run.model)\n",
        "",
        ONE,
    ),
    Mutant(
        "running statistics are not known",
        "resilient/strategies/canonical/checks.py",
        "if isinstance(module, _NormBase) and module.training and module.track_running_stats:",
        "if False:",
        ONE,
    ),
    Mutant(
        "a parameter that a forward pass changes is passed over",
        "resilient/strategies/canonical/checks.py",
        "return chain(model.named_buffers(), model.named_parameters())",
        "return chain(model.named_buffers())",
        ONE,
    ),
    Mutant(
        "the bits of parameters are not compared",
        "resilient/train/canonical_reduction.py",
        ("for name, tensor in tensors_of(run.model) if checksum_of(tensor) != before[name]"),
        ("for name, tensor in run.model.named_buffers() if checksum_of(tensor) != before[name]"),
        ONE,
    ),
    Mutant(
        "the rehearsal leaves its gradients",
        "resilient/train/canonical_reduction.py",
        ("    for parameter in run.parameters:\n        parameter.grad = None\n"),
        "",
        ONE,
    ),
    Mutant(
        "the arithmetic of the life before is forgotten",
        "resilient/train/canonical_reduction.py",
        "        if self.digest and self.digest != own_arithmetic:\n",
        "        if False:\n",
        ONE,
    ),
]
