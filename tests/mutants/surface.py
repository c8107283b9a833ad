"""Defects of what scripts override, call and read of the trainer."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LOADERS = "tests/unit/train/test_own_loaders.py"
EVALUATIONS = "tests/unit/train/test_own_evaluations.py"
CALLBACKS = "tests/unit/train/test_callback_contract.py"

MUTANTS = [
    Mutant(
        "an override that nothing calls is passed over without a word",
        "resilient/train/trainer.py",
        ("        refuse_uncalled_overrides(cls)\n"),
        "",
        "tests/unit/train/test_overridden.py",
    ),
    Mutant(
        "a train loader of the script's own is taken as it is",
        "resilient/train/build_run.py",
        "    loader = resumable_loader(hooks.args, made, sampler)\n",
        "    loader = made\n",
        LOADERS,
    ),
    Mutant(
        "a loader that is not shuffled is made again in a random order",
        "resilient/train/data/custom_loader.py",
        "        return Sequential()\n",
        "        return Sampling()\n",
        LOADERS,
    ),
    Mutant(
        "batches of an evaluation's own loader all weigh the same",
        "resilient/train/evaluation/custom_loader.py",
        "            self.share.saw(size)\n",
        "            self.share.saw(1)\n",
        EVALUATIONS,
    ),
    Mutant(
        "all ranks evaluate the same batches of a script's own loader",
        "resilient/train/evaluation/custom_loader.py",
        "    if world.size == 1:\n",
        "    if world.size >= 1:\n",
        EVALUATIONS,
    ),
    Mutant(
        "an override of an optimizer's class is not asked",
        "resilient/train/trainer_hooks.py",
        "                recipe = self.get_optimizer_cls_and_kwargs(self.args, self.model)\n",
        "                recipe = optimizers.optimizer_recipe(self.args, self.model)\n",
        "tests/unit/train/test_optimizer_class.py",
    ),
    Mutant(
        "a card forgets the tags of the one that is there",
        "resilient/train/model/card.py",
        '        tags=[*listed(info.tags), *tags_in(folder / "README.md")],\n',
        "        tags=listed(info.tags),\n",
        "tests/unit/train/test_model_card.py",
    ),
    Mutant(
        "a metric that no dataset of a dict gives is found out at the first evaluation",
        "resilient/train/evaluation/loop.py",
        "    if sets and not any(",
        "    if not sets and not any(",
        EVALUATIONS,
    ),
    Mutant(
        "a state that a callback exports is not given back",
        "resilient/train/callbacks/base.py",
        "        setattr(callback, name, value)\n",
        "        pass\n",
        CALLBACKS,
    ),
    Mutant(
        "callbacks get the very entry of the history",
        "resilient/train/trainer_evaluation.py",
        'fire("on_log", logs=dict(entry))',
        'fire("on_log", logs=entry)',
        CALLBACKS,
    ),
    Mutant(
        "what there is not yet is no argument of an event",
        "resilient/train/callbacks/base.py",
        "dict.fromkeys(CONTEXT)",
        "{}",
        CALLBACKS,
    ),
    Mutant(
        "a callback that hears nothing is taken",
        "resilient/train/callbacks/base.py",
        "isinstance(made, TrainerCallback) or any(",
        "True or any(",
        CALLBACKS,
    ),
]
