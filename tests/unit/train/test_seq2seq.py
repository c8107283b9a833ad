"""Evaluation by what a model generates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from resilient import Seq2SeqTrainer, Seq2SeqTrainingArguments
from resilient.errors import ConfigError

transformers = pytest.importorskip("transformers")
PAD, START = 0, 1


class Pairs(torch.utils.data.Dataset):
    """Sequences and the same backwards."""

    def __init__(self, size=10):
        generator = torch.Generator().manual_seed(4)
        self.rows = torch.randint(3, 20, (size, 5), generator=generator)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return {"input_ids": row, "labels": row.flip(0), "text": f"row {index}"}


@pytest.fixture(scope="module")
def t5():
    config = transformers.T5Config(
        vocab_size=20,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        pad_token_id=PAD,
        decoder_start_token_id=START,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(config)


def make(folder, model, **options):
    seen = []

    def compute(prediction):
        seen.append(prediction)
        return {"tokens": int(np.prod(prediction.predictions.shape))}

    arguments = Seq2SeqTrainingArguments(
        str(folder), per_device_eval_batch_size=4, use_cpu=True, disable_tqdm=True, **options
    )
    data = Pairs()
    trainer = Seq2SeqTrainer(
        model, arguments, train_dataset=data, eval_dataset=data, compute_metrics=compute
    )
    return trainer, seen


def test_metrics_get_what_the_model_generates(tmp_path, repository, t5):
    trainer, seen = make(
        tmp_path, t5, predict_with_generate=True, generation_max_length=7, generation_num_beams=2
    )
    metrics = trainer.evaluate()
    [judged] = seen
    expected = t5.eval().generate(trainer.eval_dataset.rows, max_length=7, num_beams=2)
    missing = 7 - expected.shape[1]
    expected = nn.functional.pad(expected, (0, missing), value=PAD)
    assert judged.predictions.tolist() == expected.tolist()
    assert judged.label_ids.tolist() == trainer.eval_dataset.rows.flip(1).tolist()
    assert metrics["eval_tokens"] == 70
    scores, _ = make(tmp_path, t5, prediction_loss_only=True)
    assert metrics["eval_loss"] == scores.evaluate()["eval_loss"]


def test_what_an_evaluation_is_told_goes_before_the_arguments(tmp_path, repository, t5):
    trainer, seen = make(tmp_path, t5, predict_with_generate=True, generation_max_length=7)
    trainer.evaluate(max_length=4, num_beams=1)
    trainer.predict(trainer.eval_dataset, max_new_tokens=8)
    trainer.evaluate()
    assert [one.predictions.shape for one in seen] == [(10, 4), (10, 9), (10, 7)]


def test_without_generation_predictions_are_scores(tmp_path, repository, t5):
    trainer, seen = make(tmp_path, t5)
    trainer.evaluate(ignore_keys=["past_key_values", "encoder_last_hidden_state"])
    assert seen[0].predictions.shape == (10, 5, 20)


def test_training_evaluates_by_generation_and_resumes(tmp_path, repository, t5):
    options = {
        "predict_with_generate": True,
        "generation_max_length": 6,
        "max_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
    }
    trainer, seen = make(tmp_path, t5, **options)
    trainer.train()
    assert len(seen) == 2
    history = trainer.state.log_history
    again, _ = make(tmp_path, t5, **options)
    again.train(resume_from_checkpoint="checkpoint-2-g1")
    assert again.state.log_history == history


class Copies(nn.Module):
    """A plain module that generates: no config, no tokenizer."""

    def __init__(self, extra=1):
        super().__init__()
        self.embedding = nn.Embedding(20, 4)
        self.extra = extra

    def forward(self, input_ids, labels=None):
        return {"loss": self.embedding(labels).square().mean()}

    def generate(self, input_ids, max_length=None):
        return torch.cat([input_ids[:, : max_length or 5], input_ids[:, : self.extra]], dim=1)


def test_a_plain_module_may_generate(tmp_path, repository):
    trainer, seen = make(tmp_path, Copies(), predict_with_generate=True)
    trainer.evaluate()
    assert seen[0].predictions.shape == (10, 6)
    assert seen[0].predictions[:, :5].tolist() == trainer.eval_dataset.rows.tolist()
    with pytest.raises(ConfigError, match="pad_token_id"):
        trainer.evaluate(max_length=9)


def test_a_model_that_cannot_generate_is_named(tmp_path, repository):
    trainer, _ = make(tmp_path, nn.Linear(2, 2), predict_with_generate=True)
    trainer.args.remove_unused_columns = False
    with pytest.raises(ConfigError, match="`Linear`"):
        trainer.prediction_step(trainer.model, {"x": torch.ones(1, 2)}, False)


def test_a_generation_config_is_read_from_where_it_is(tmp_path, repository, t5):
    config = transformers.GenerationConfig(max_length=5, decoder_start_token_id=START)
    config.save_pretrained(tmp_path)
    before = t5.generation_config
    trainer, seen = make(
        tmp_path / "out", t5, predict_with_generate=True, generation_config=str(tmp_path)
    )
    trainer.evaluate()
    assert t5.generation_config.max_length == 5
    assert seen[0].predictions.shape == (10, 5)
    t5.generation_config = before
    with pytest.raises(ConfigError, match="cannot be loaded"):
        make(tmp_path / "out", t5, generation_config=str(tmp_path / "no"))
