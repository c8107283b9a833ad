"""Low precision beyond autocast, and what is refused on which device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from resilient import Trainer, TrainingArguments
from resilient.errors import ConfigError
from resilient.train.model.precision import require_precision_support, to_fp8, weights_in


class Guess(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.tied = nn.Linear(16, 16, bias=False)
        self.tied.weight = self.linear.weight
        self.seen: list[torch.dtype] = []

    def forward(self, x, labels):
        self.seen.append(x.dtype)
        guessed = self.tied(torch.tanh(self.norm(self.linear(x))))
        return {"loss": nn.functional.cross_entropy(guessed, labels), "logits": guessed}


DATA = [{"x": torch.randn(16), "labels": torch.tensor(n % 16)} for n in range(16)]


def bits(model):
    return {name: one.clone() for name, one in model.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_and_inputs_are_of_the_dtype_and_come_back_to_the_bit(dtype):
    model = Guess().eval()
    before, weight = bits(model), model.linear.weight
    with torch.no_grad(), weights_in(model, dtype):
        assert {one.dtype for one in model.parameters()} == {dtype}
        assert model.tied.weight is model.linear.weight
        out = model(torch.randn(2, 16), torch.tensor([1, 2]))
    assert out["logits"].dtype == dtype
    assert model.linear.weight is weight
    assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())
    model(torch.randn(2, 16), torch.tensor([1, 2]))
    assert model.seen == [dtype, torch.float32]


def test_they_come_back_when_an_evaluation_fails():
    model = Guess()

    def fail():
        with weights_in(model, torch.bfloat16):
            raise ValueError("broken metric")

    with pytest.raises(ValueError, match="broken metric"):
        fail()
    assert model.linear.weight.dtype == torch.float32


@pytest.mark.parametrize("name", ["bf16_full_eval", "fp16_full_eval"])
def test_the_trainer_evaluates_in_half_and_trains_on_whole(tmp_path, name):
    def trained(folder, **more):
        args = TrainingArguments(
            str(tmp_path / folder),
            max_steps=3,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="no",
            use_cpu=True,
            **more,
        )
        trainer = Trainer(Guess(), args, train_dataset=DATA, eval_dataset=DATA)
        trainer.train()
        return trainer

    half, whole = trained("half", **{name: True}), trained("whole")
    assert set(half.model.seen) == {torch.float32, getattr(torch, _TORCHS[name])}
    ours, theirs = bits(half.model), bits(whole.model)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    losses = [
        [one["eval_loss"] for one in trainer.state.log_history if "eval_loss" in one]
        for trainer in (half, whole)
    ]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert half.predict(DATA).predictions.dtype.name == "float32"


_TORCHS = {"bf16_full_eval": "bfloat16", "fp16_full_eval": "float16"}


def test_weights_that_are_cut_cannot_be_evaluated_in_half():
    with pytest.raises(ConfigError, match="whole replicas"):
        TrainingArguments(bf16_full_eval=True, fsdp=True)


@pytest.mark.parametrize(
    ("asked", "capability", "said"),
    [
        ({"bf16": True}, (7, 5), "needs a GPU of the Ampere generation"),
        ({"bf16_full_eval": True}, (7, 0), "needs a GPU of the Ampere generation"),
        ({"fp8": True}, (8, 0), "needs a GPU of the Ada generation"),
        ({"fp8": True, "fp8_recipe": "rowwise"}, (8, 9), "Hopper"),
        ({"fp8": True, "fp8_recipe": "rowwise"}, None, "this run trains on the CPU"),
    ],
)
def test_what_a_device_cannot_is_refused(asked, capability, said):
    with pytest.raises(ConfigError, match=said):
        require_precision_support(TrainingArguments(**asked), capability)


@pytest.mark.parametrize(
    ("asked", "capability"),
    [
        ({"bf16": True}, None),
        ({"fp16": True}, None),
        ({"fp8": True}, None),
        ({"fp16": True}, (7, 0)),
        ({"bf16": True, "fp8": True}, (8, 9)),
        ({"fp8": True, "fp8_recipe": "rowwise"}, (9, 0)),
    ],
)
def test_what_a_device_can_is_taken(asked, capability):
    require_precision_support(TrainingArguments(**asked), capability)


def test_a_model_without_fitting_layers_cannot_multiply_in_fp8():
    pytest.importorskip("torchao", reason="torchao is not installed")
    with pytest.raises(ConfigError, match="multiples of 16"):
        to_fp8(nn.Linear(16, 3), "tensorwise")
