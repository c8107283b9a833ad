"""Defects of runs that draw random numbers, and are overridden, as those of Transformers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

GROUPED = "tests/unit/train/interop/test_grouped_runs.py"
DRAWING = "resilient/train/data/ordering.py"
STEPS = "tests/unit/train/test_accelerator.py"
GANGS = "tests/process/test_stock_steps.py"
OVERRIDDEN = "tests/unit/train/test_overridden.py"
ACCELERATOR = "resilient/train/hf_compat.py"

MUTANTS = [
    Mutant(
        "the order of a run that draws as theirs is not drawn",
        "resilient/train/data/ordering.py",
        "        drawn = drawn_order(cursor) if cursor.drawn else Sampling().order(cursor)\n",
        "        drawn = Sampling().order(cursor)\n",
        f"{GROUPED} -k draws_as_theirs",
    ),
    Mutant(
        "an order is drawn before the number of its loader",
        DRAWING,
        "    draw_for_loader(cursor)\n    if not cursor.origin",
        "    if not cursor.origin",
        f"{GROUPED} -k draws_as_theirs",
    ),
    Mutant(
        "drawing an order leaves the stream as it was",
        DRAWING,
        "    cursor.drawn = shared[0]\n    torch.randperm(cursor.size)\n",
        "    cursor.drawn = shared[0]\n",
        f"{GROUPED} -k draws_as_theirs",
    ),
    Mutant(
        "what an order was drawn from is not saved",
        "resilient/train/data/sampler.py",
        '            **({"drawn": self.drawn} if self.drawn else {}),\n',
        "",
        f"{GROUPED} -k outlives_a_death",
    ),
    Mutant(
        "an epoch of theirs that is under way goes on in an order of ours",
        "resilient/train/data/sampler.py",
        "            self.drawn = find_drawn(place, self.streams, self.size)\n",
        "            pass\n",
        f"{GROUPED} -k taken_over",
    ),
    Mutant(
        "an order that nothing proves is gone on with",
        DRAWING,
        "    if is_proven or (epoch == 0 and streams.is_known):\n",
        "    if is_proven or streams.is_known:\n",
        f"{GROUPED} -k refused_unless",
    ),
    Mutant(
        "what evaluations drew is not drawn again",
        DRAWING,
        "        for _ in range(evaluated.count(number)):\n",
        "        for _ in range(0):\n",
        f"{GROUPED} -k refused_unless",
    ),
    Mutant(
        "what a model_init drew is taken for nothing",
        "resilient/train/build_run.py",
        ("HFRandomStreams(hooks.args.seed, is_known=hooks.model_init is None)"),
        ("HFRandomStreams(hooks.args.seed)"),
        f"{GROUPED} -k model_init",
    ),
    Mutant(
        "an order that theirs would draw anew is exported",
        "resilient/train/hf_interop/exporter.py",
        "and not is_alike and _groups(config):",
        "and False:",
        f"{GROUPED} -k stock_transformers_would",
    ),
    Mutant(
        "each rank takes the order that its own stream gives",
        DRAWING,
        "    if dist.is_initialized():\n",
        "    if False:\n",
        f"{GANGS} -k come_apart",
    ),
    Mutant(
        "a script's own step is not scaled for fp16",
        ACCELERATOR,
        "        self._trainer.make_backward(loss)\n",
        "        loss.backward()\n",
        f"{STEPS} -k same_bits",
    ),
    Mutant(
        "a loss is computed outside of the context that a script overrides",
        "resilient/train/trainer_hooks.py",
        "        with self.compute_loss_context_manager():\n",
        "        with self.precision.autocast():\n",
        f"{STEPS} -k scripts_own",
    ),
    Mutant(
        "every micro-batch is said to be the last of its step",
        "resilient/train/trainer_hooks.py",
        "        self.is_last_micro_batch = left == 0\n",
        "",
        f"{STEPS} -k same_bits",
    ),
    Mutant(
        "ranks gather in an evaluation, where one may not come",
        ACCELERATOR,
        "        if not self._trainer.model.training:\n",
        "        if False:\n",
        f"{GANGS} -k kept_from_it",
    ),
    Mutant(
        "only what the last class overrides is looked at",
        "resilient/train/hf_compat.py",
        'for cls in kind.__mro__ if not cls.__module__.startswith("resilient.")]',
        "for cls in (kind,)]",
        f"{OVERRIDDEN} -k nothing_would_call",
    ),
    Mutant(
        "a script's word on what decays is not heard",
        "resilient/train/trainer_hooks.py",
        "self.optimizer = optimizers.make_optimizer(self.args, self.model, recipe, names)",
        "self.optimizer = optimizers.make_optimizer(self.args, self.model, recipe)",
        f"{OVERRIDDEN} -k decays",
    ),
    Mutant(
        "what decays may be overridden where nothing asks it",
        "resilient/train/trainer_hooks.py",
        "            self._require_decay_to_count(recipe[1])\n",
        "",
        f"{OVERRIDDEN} -k groups_are_others",
    ),
    Mutant(
        "a script's own preparation of inputs is passed over",
        "resilient/train/trainer_hooks.py",
        "            return self._prepare_input(inputs)\n",
        "            pass\n",
        f"{OVERRIDDEN} -k prepare",
    ),
]
