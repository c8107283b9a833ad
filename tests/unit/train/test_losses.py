"""Losses: one over all tokens of a step, smoothed ones, and those of the user."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from resilient.errors import ConfigError
from resilient.train.arguments import TrainingArguments
from resilient.train.model.loss import (
    LabelSmoother,
    accepts_loss_kwargs,
    count_labels,
    label_smoother_for,
    shifts_labels,
)
from resilient.train.trainer import Trainer
from tests.unit.train.token_models import LENGTH, WORDS, Mean, Sentences, Tagger


def trained(folder, model, *, kind=Trainer, data=None, loss=None, **options):
    """Train two epochs by plain SGD; return the weights and the logged losses."""
    options = {
        "output_dir": str(folder),
        "optim": "sgd",
        "learning_rate": 0.7,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        **options,
    }
    trainer = kind(
        model,
        TrainingArguments(**options),
        train_dataset=data or Sentences(),
        compute_loss_func=loss,
    )
    trainer.train()
    history = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return trainer.model.state_dict(), history


def own_loss(outputs, labels, num_items_in_batch=None):
    total = nn.functional.cross_entropy(
        outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum"
    )
    return total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


WAYS = {
    "the model divides": (Tagger, {}),
    "a function of the user": (Mean, {"loss": own_loss}),
    "smoothed": (Mean, {"label_smoothing_factor": 0.2}),
    "smoothed, and the model divides": (Tagger, {"label_smoothing_factor": 0.2}),
}


def close(one, other):
    return all(torch.allclose(one[name], other[name], rtol=0, atol=1e-12) for name in one)


@pytest.mark.parametrize("way", WAYS)
def test_an_accumulated_step_is_one_of_a_big_batch(tmp_path, repository, way):
    """20 rows are ten micro-batches of 2: windows of 3, 3, 3 and 1; or batches of 6, 6, 6, 2."""
    kind, options = WAYS[way]
    small, losses = trained(tmp_path, kind(), gradient_accumulation_steps=3, **options)
    big, whole = trained(tmp_path, kind(), per_device_train_batch_size=6, **options)
    assert losses == pytest.approx(whole, abs=1e-12)
    assert len(losses) == 8
    assert close(small, big)


def test_means_of_micro_batches_are_not_that(tmp_path, repository):
    small, losses = trained(tmp_path, Mean(), gradient_accumulation_steps=3)
    big, whole = trained(tmp_path, Mean(), per_device_train_batch_size=6)
    assert losses != pytest.approx(whole, abs=1e-4)
    assert not close(small, big)


def test_a_step_whose_labels_are_all_ignored_changes_nothing(tmp_path, repository):
    data = Sentences()
    data.labels.fill_(-100)
    model = Tagger()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    weights, losses = trained(tmp_path, model, data=data, max_steps=2, logging_nan_inf_filter=False)
    assert losses == [0.0, 0.0]
    assert close(before, weights)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("items", [None, 5, torch.tensor(7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_smoothing_equals_transformers_to_the_bit(shift, items, dtype):
    theirs = pytest.importorskip("transformers.trainer_pt_utils").LabelSmoother(0.1)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, LENGTH, WORDS, generator=generator).to(dtype)
    labels = Sentences(3).labels
    ours = LabelSmoother(0.1)({"logits": logits}, labels, shift, items)
    assert torch.equal(ours, theirs({"logits": logits}, labels, shift, items))
    assert torch.equal(LabelSmoother(0.1)(logits, labels, shift, items), ours)


def test_smoothing_is_cross_entropy_with_smoothed_targets():
    data, logits = Sentences(4), torch.randn(4, LENGTH, WORDS, dtype=torch.float64)
    torchs = nn.functional.cross_entropy(
        logits.flatten(0, 1), data.labels.flatten(), label_smoothing=0.3
    )
    assert LabelSmoother(0.3)((logits,), data.labels).item() == pytest.approx(torchs.item())


def test_several_labels_of_a_sample_are_not_smoothed():
    model = Mean()
    assert label_smoother_for(model, 0.0) is None
    assert label_smoother_for(model, 0.1) == LabelSmoother(0.1)
    model.config = type("Config", (), {"problem_type": "multi_label_classification"})()
    assert label_smoother_for(model, 0.1) is None


def test_a_function_of_the_user_gets_the_labels_of_tuples_too(tmp_path, repository):
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    seen = []

    def squared(outputs, labels, num_items_in_batch=None):
        seen.append((tuple(labels.shape), int(num_items_in_batch)))
        return ((outputs - labels) ** 2).sum() / num_items_in_batch

    model = nn.Linear(3, 1)
    trained(
        tmp_path,
        model,
        data=TensorDataset(x, x.sum(1, keepdim=True)),
        loss=squared,
        gradient_accumulation_steps=3,
        num_train_epochs=1,
    )
    assert seen == [((2, 1), 6)] * 3 + [((2, 1), 2)]


def test_evaluation_has_the_loss_of_the_function_too(tmp_path, repository):
    trainer = Trainer(
        Mean(),
        TrainingArguments(str(tmp_path), disable_tqdm=True, per_device_eval_batch_size=6),
        eval_dataset=Sentences(6),
        compute_loss_func=lambda outputs, labels, num_items_in_batch=None: (
            outputs["logits"].sum() * 0 + 7
        ),
    )
    assert trainer.evaluate()["eval_loss"] == 7


class Halved(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        assert num_items_in_batch is None
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        return (loss / 2, outputs) if return_outputs else loss / 2


class DividesItself(Trainer):
    loss_is_scaled_for_ga = True

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return own_loss(model(inputs["input_ids"]), inputs["labels"], num_items_in_batch)


def test_compute_loss_is_overridden(tmp_path, repository):
    _, plain = trained(tmp_path, Mean(), max_steps=1, gradient_accumulation_steps=2)
    _, halved = trained(tmp_path, Mean(), max_steps=1, gradient_accumulation_steps=2, kind=Halved)
    assert halved == [pytest.approx(plain[0] / 2)]


def test_an_override_that_says_it_divides_gets_the_count(tmp_path, repository):
    _, own = trained(tmp_path, Mean(), kind=DividesItself, gradient_accumulation_steps=3)
    _, models = trained(tmp_path, Tagger(), gradient_accumulation_steps=3)
    assert own == pytest.approx(models, abs=1e-12)


class OldFashioned(Trainer):
    def training_step(self, model, inputs):
        return super().training_step(model, inputs)


def test_an_override_that_would_lose_the_count_is_refused(tmp_path, repository):
    trained(tmp_path, Mean(), kind=OldFashioned, max_steps=1)
    with pytest.raises(ConfigError, match="does not take `num_items_in_batch`"):
        trained(tmp_path, Tagger(), kind=OldFashioned, max_steps=1)


def test_what_a_model_takes_is_read_from_it():
    class Open(Mean):
        def forward(self, input_ids, labels=None, **options):
            return super().forward(input_ids, labels)

    class Adapter(nn.Module):
        def get_base_model(self):
            return Tagger()

    said = Open()
    said.accepts_loss_kwargs = True
    assert [accepts_loss_kwargs(one) for one in (Tagger(), Mean(), Open(), said, Adapter())] == [
        *(True, False, False, True, True)
    ]


def test_labels_are_counted_as_transformers_counts_them(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 4, "n_head": 1, "vocab_size": WORDS}
    llama = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "vocab_size": WORDS}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    other = transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama, **heads))
    data = [{"labels": Sentences(4).labels}, {"labels": Sentences(2).labels}]
    for model in (gpt, other):
        args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
        trainer = transformers.Trainer(model, args)
        theirs = trainer._get_num_items_in_batch(data, torch.device("cpu"))
        assert count_labels(data, shifted=shifts_labels(model)) == theirs
        assert accepts_loss_kwargs(model) == trainer.model_accepts_loss_kwargs
    assert shifts_labels(other)
    ready = [{"labels": torch.zeros(2, 3), "shift_labels": torch.tensor([1, -100])}]
    assert count_labels(ready, shifted=True) == 1
    assert count_labels([{"labels": ["a"]}], shifted=False) is None
