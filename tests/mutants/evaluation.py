"""Defects of evaluation: what is counted, in which order, and what metrics see of it."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PLAIN = "tests/unit/train/test_evaluation.py"
OPTIONS = "tests/unit/train/test_evaluation_options.py"
RECIPES = "tests/unit/train/test_metric_recipes.py"
TOGETHER = "tests/process/test_evaluation_together.py"
STREAMS = "tests/unit/train/test_streams.py"
HISTORY = "tests/unit/train/test_log_history.py"

MUTANTS = [
    Mutant(
        "the last batch of an evaluation weighs as much as a whole one",
        "resilient/train/evaluation/loop.py",
        "(size * loss for size, loss",
        "(self.batch * loss for _, loss",
        PLAIN,
    ),
    Mutant(
        "an evaluation changes what is drawn after it",
        "resilient/train/trainer_evaluation.py",
        "    finally:\n        RandomState().load_state_dict(before)\n",
        "    finally:\n        pass\n",
        f"{PLAIN} -k draws",
    ),
    Mutant(
        "a run that began elsewhere gets back what its evaluations drew",
        "resilient/train/trainer_evaluation.py",
        "if sampler is not None and sampler.cursor.origin:",
        "if sampler is not None and sampler is False:",
        f"{PLAIN} -k elsewhere",
    ),
    Mutant(
        "metrics get one loss for a batch, not one for a sample",
        "resilient/train/evaluation/loop.py",
        "np.repeat(np.asarray(losses, dtype=np.float64), self.weights)",
        "np.asarray(losses, dtype=np.float64)",
        f"{TOGETHER} -k asked_for",
    ),
    Mutant(
        "batches that only keep step are counted",
        "resilient/train/evaluation/loop.py",
        "        if self._share.counts(self._seen):\n",
        "        if self._seen >= 0:\n",
        f"{TOGETHER} -k together_see",
    ),
    Mutant(
        "a rank without a batch counts the one that it runs for its shapes",
        "resilient/train/evaluation/loop.py",
        "own_losses[:0] if share.is_stand_in else own_losses",
        "own_losses",
        f"{TOGETHER} -k together_see",
    ),
    Mutant(
        "rows that are shorter than others are filled with zeros",
        "resilient/train/evaluation/gather.py",
        "rows.new_full(tuple(shape), PADDING)",
        "rows.new_zeros(tuple(shape))",
        PLAIN,
    ),
    Mutant(
        "rows stay in the order in which ranks had them",
        "resilient/train/evaluation/loop.py",
        "to_numpy(torch.empty_like(rows).index_copy_(0, torch.tensor(order), rows))",
        "to_numpy(rows)",
        f"{TOGETHER} -k together_see",
    ),
    Mutant(
        "rows that were gathered early lie where those of the end do",
        "resilient/train/evaluation/loop.py",
        "        every = self._joining.every or max(len(shares[0]), 1)\n",
        "        every = max(len(shares[0]), 1)\n",
        f"{TOGETHER} -k together_see",
    ),
    Mutant(
        "a model is evaluated as it is trained, with dropout",
        "resilient/train/trainer_evaluation.py",
        "        self.model.eval()\n",
        "",
        PLAIN,
    ),
    Mutant(
        "a model stays as it was evaluated, without dropout",
        "resilient/train/trainer_evaluation.py",
        "        self.model.train(was_training)\n",
        "",
        f"{PLAIN} -k the_mode_alone",
    ),
    Mutant(
        "a dataset that is empty has a perfect evaluation",
        "resilient/train/trainer_evaluation.py",
        "        if not batches:\n",
        "        if batches is None:\n",
        f"{STREAMS} -k not_evaluated_to_nothing",
    ),
    Mutant(
        "speeds are kept in the history, which no two runs then share",
        "resilient/train/trainer_evaluation.py",
        "        self.log(output.metrics)\n",
        "        self.log({**output.metrics, **speed})\n",
        f"{PLAIN} -k not_kept",
    ),
    Mutant(
        "several datasets have metrics of one name",
        "resilient/train/trainer_evaluation.py",
        'f"{metric_key_prefix}_{name}"',
        "metric_key_prefix",
        f"{PLAIN} -k dict_of_datasets",
    ),
    Mutant(
        "predictions are computed where only the loss is wanted",
        "resilient/train/trainer_hooks.py",
        "        if prediction_loss_only:\n",
        "        if prediction_loss_only is None:\n",
        f"{OPTIONS} -k the_loss_alone",
    ),
    Mutant(
        "metrics of batches are never asked for",
        "resilient/train/evaluation/custom_loader.py",
        "self._compute(self._last, compute_result=True)",
        "self._compute(self._last, compute_result=False)",
        f"{TOGETHER} -k once_at_the_end",
    ),
    Mutant(
        "metrics of batches get one loss for a batch",
        "resilient/train/evaluation/custom_loader.py",
        "loss.repeat(len(first_of(predictions)))",
        "loss.repeat(1)",
        f"{TOGETHER} -k once_at_the_end",
    ),
    Mutant(
        "an entity goes on behind its end",
        "resilient/train/evaluation/metrics.py",
        "prefix in _BEGINS or before in _ENDS or",
        "prefix in _BEGINS or",
        RECIPES,
    ),
    Mutant(
        "f1 of rare classes counts as much as that of frequent ones",
        "resilient/train/evaluation/metrics.py",
        "(f1 * support).sum() / support.sum()",
        "f1.mean()",
        RECIPES,
    ),
    Mutant(
        "what is padded counts as right or wrong",
        "resilient/train/evaluation/metrics.py",
        "float((labels == found)[counted].mean())",
        "float((labels == found).mean())",
        RECIPES,
    ),
    Mutant(
        "metrics of one split wipe out those of another",
        "resilient/train/trainer_evaluation.py",
        "_write(path, {**before, **metrics})",
        "_write(path, metrics)",
        f"{OPTIONS} -k shown_and_written",
    ),
    Mutant(
        "a stream that was evaluated is as long as its last round",
        "resilient/train/evaluation/loop.py",
        "        self.samples += taken\n",
        "        self.samples = taken\n",
        f"{STREAMS} -k stream_is_evaluated",
    ),
    Mutant(
        "batches of a stream that only keep step are counted",
        "resilient/train/evaluation/loop.py",
        "return self.own[nth] or nth == 0",
        "return bool(self.own)",
        f"{TOGETHER} -k together_see",
    ),
    Mutant(
        "a resume decodes the whole history",
        "resilient/train/state.py",
        ("        self._list = None if isinstance(entries, JsonRows) else entries\n"),
        "        self._list = (\n"
        "            _entries(entries.trees) if isinstance(entries, JsonRows) else entries\n"
        "        )\n",
        HISTORY,
    ),
    Mutant(
        "an entry that is noted after a save is in no checkpoint",
        "resilient/format/state_json.py",
        "[self.text, *more] if self.text else more",
        "[self.text] if self.text else more",
        HISTORY,
    ),
    Mutant(
        "the metrics of an older step are taken for those of this one",
        "resilient/train/state.py",
        'entry.get("step") == self.global_step',
        'entry.get("step") is not None',
        HISTORY,
    ),
    Mutant(
        "a list in an entry ends the history",
        "resilient/format/state_json.py",
        'f"\\n{_EDGE}]"',
        'f"{_EDGE}]"',
        HISTORY,
    ),
]
