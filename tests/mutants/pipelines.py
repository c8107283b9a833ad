"""Defects of models cut into stages, and of the choice between ways of being parallel."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TREES = "tests/unit/strategies/test_pipeline_trees.py"
CUTTING = "tests/unit/strategies/test_pipeline_cutting.py"
OPTIONS = "tests/unit/strategies/test_pipeline_options.py"
STAGED = "tests/unit/state_dict/test_staged.py"
RANDOM = "tests/unit/strategies/test_pipeline_random.py"
CHOOSING = "tests/unit/strategies/test_choosing.py"
RUNS = "tests/process/test_pipelines.py"

MUTANTS = [
    Mutant(
        "a skip connection over stages trains with nothing",
        "resilient/strategies/pipeline/runtime.py",
        "        if is_fake(made):\n",
        "        if False:\n",
        TREES,
    ),
    Mutant(
        "a second tensor between stages is not noticed where a stage begins",
        "resilient/strategies/pipeline/partition.py",
        "        if is_fake((given, named)):\n",
        "        if False:\n",
        TREES,
    ),
    Mutant(
        "a stage is given its tensor as often as it is called",
        "resilient/strategies/pipeline/partition.py",
        "        waiting, self.waiting = self.waiting, None\n",
        "        waiting = self.waiting\n",
        TREES,
    ),
    Mutant(
        "stages go on training while the model is evaluated",
        "resilient/strategies/pipeline/runtime.py",
        "        if self.tree.training != whole.training:\n",
        "        if False:\n",
        TREES,
    ),
    Mutant(
        "a tensor of another shape than planned is sent",
        "resilient/strategies/pipeline/runtime.py",
        "        if (tuple(tensor.shape), tensor.dtype) != planned:\n",
        "        if False:\n",
        TREES,
    ),
    Mutant(
        "the last stage has the most layers",
        "resilient/strategies/pipeline/partition.py",
        "[-(-len(layers) * stage // stages) for",
        "[len(layers) * stage // stages for",
        CUTTING,
    ),
    Mutant(
        "tied parameters are cut apart",
        "resilient/strategies/pipeline/partition.py",
        "    _refuse_ties(model, places)\n",
        "",
        CUTTING,
    ),
    Mutant(
        "a short last step is given to a schedule that cannot take it",
        "resilient/strategies/pipeline/runtime.py",
        "    if micro_batches_fit(options, count):\n",
        "    if True:\n",
        OPTIONS,
    ),
    Mutant(
        "each rank of a stage writes what all of them have",
        "resilient/state_dict/pipeline.py",
        "    if not writes:\n",
        "    if False:\n",
        STAGED,
    ),
    Mutant(
        "each stage writes the buffers that all have",
        "resilient/state_dict/pipeline.py",
        "self._writes and name not in self._but",
        "self._writes",
        STAGED,
    ),
    Mutant(
        "a stage's groups lose the names of the others",
        "resilient/state_dict/pipeline.py",
        '            {**group, "params": names}\n',
        '            {**group, "params": [one for one in names if one in held]}\n',
        STAGED,
    ),
    Mutant(
        "gradients are clipped by the norm of a stage",
        "resilient/strategies/pipeline/strategy.py",
        "        dist.all_reduce(square, group=self._place.pipeline_group)\n",
        "",
        f"{RUNS} -k whole_model",
    ),
    Mutant(
        "stages begin their random numbers anew in each life",
        "resilient/strategies/pipeline/strategy.py",
        '            RANDOM: Part(pipelined.random, scope="rank"),\n',
        "",
        f"{RUNS} -k killed",
    ),
    Mutant(
        "all stages draw the same random numbers",
        "resilient/strategies/pipeline/runtime.py",
        "1_000_003 * (place.number + 1)",
        "1_000_003",
        RANDOM,
    ),
    Mutant(
        "what layers draw is drawn from the process's own numbers",
        "resilient/strategies/pipeline/runtime.py",
        "        finally:\n            self._write(outside)\n",
        "        finally:\n            pass\n",
        RANDOM,
    ),
    Mutant(
        "the model fits on each rank if it fits on all together",
        "resilient/strategies/auto.py",
        "    if need <= room:\n",
        "    if need <= room * machine.ranks:\n",
        CHOOSING,
    ),
    Mutant(
        "stages are chosen where little time is left between their ends",
        "resilient/strategies/auto.py",
        "        and count >= MICRO_BATCHES_PER_STAGE * size\n",
        "",
        CHOOSING,
    ),
]
