"""Which layers compute their activations again, and that they do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from resilient import Trainer, TrainingArguments
from resilient.errors import ConfigError
from resilient.strategies.activation_checkpointing import layers_of, read_recomputing, recompute


class Layer(nn.Module):
    def __init__(self, width=4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.drop = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, hidden, scale=1.0):
        self.calls += 1
        return self.drop(torch.tanh(self.linear(hidden))) * scale


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Layer(), nn.ReLU()) for _ in range(3))
        self.head = nn.Sequential(nn.Tanh(), Layer())

    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def gradients(how=None, layer_classes=()):
    torch.manual_seed(3)
    model = Stack()
    if how is not None:
        recompute(model, read_recomputing(how), layer_classes)
    model(torch.randn(5, 4, requires_grad=True)).sum().backward()
    calls = [one.calls for one in model.modules() if isinstance(one, Layer)]
    return [one.grad for one in model.parameters()], calls, model


@pytest.mark.parametrize("how", [{}, {"use_reentrant": True}, {"offload": True}])
def test_gradients_and_random_draws_are_the_same(how):
    stored, once, _ = gradients()
    again, twice, model = gradients(how)
    assert (once, twice) == ([1, 1, 1, 1], [2, 2, 2, 2])
    assert all(torch.equal(*pair) for pair in zip(stored, again, strict=True))
    assert list(model.state_dict()) == list(Stack().state_dict())


def test_every_nth_layer_can_be_computed_again():
    assert gradients({"every_n_layers": 2})[1] == [2, 1, 2, 1]


def test_random_draws_differ_when_they_are_not_preserved():
    options = {"preserve_rng_state": False, "determinism_check": "none"}
    stored, again = gradients()[0], gradients(options)[0]
    assert not all(torch.equal(*pair) for pair in zip(stored, again, strict=True))


def test_layers_are_found_by_class_or_as_items_of_outermost_lists():
    model = Stack()
    assert list(layers_of(model)) == [*model.blocks, model.head[1]]
    assert len(layers_of(model, ["Linear"])) == 4
    assert gradients({}, ["Linear"])[1] == [1, 1, 1, 1]


def test_nothing_is_stored_or_computed_again_without_gradients():
    _, _, model = gradients({})
    before = model.blocks[0][0].calls
    with torch.no_grad():
        model(torch.randn(5, 4))
    assert model.blocks[0][0].calls == before + 1


def test_a_second_training_does_not_compute_thrice():
    _, _, model = gradients({})
    recompute(model, read_recomputing({}))
    model(torch.randn(5, 4)).sum().backward()
    assert model.blocks[0][0].calls == 4


def test_a_model_that_knows_its_layers_is_asked():
    class Knowing(nn.Module):
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs=None):
            self.told = gradient_checkpointing_kwargs

    model = Knowing()
    recompute(model, read_recomputing({"preserve_rng_state": False}))
    assert model.told == {"use_reentrant": False, "preserve_rng_state": False}
    with pytest.raises(ConfigError, match="has no `every_n_layers`"):
        recompute(Knowing(), read_recomputing({"every_n_layers": 2}))


def test_a_transformer_computes_again():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=4, n_head=2, n_embd=8, vocab_size=11, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    recompute(model, read_recomputing({"every_n_layers": 2}))
    on = [block.gradient_checkpointing for block in model.transformer.h]
    assert on == [True, False, True, False]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"activation_checkpointing_kwargs": {"use_reentrent": True}}, "did you mean `use_reent"),
        ({"activation_checkpointing_kwargs": {"every_n_layers": 0}}, "at least 1"),
        (
            {
                "fsdp": True,
                "activation_checkpointing": True,
                "activation_checkpointing_kwargs": {"use_reentrant": True},
            },
            "gives wrong gradients under FSDP",
        ),
    ],
)
def test_what_cannot_be_is_refused(arguments, said):
    with pytest.raises(ConfigError, match=said):
        TrainingArguments(**arguments)


def test_a_model_without_layers_is_refused():
    with pytest.raises(ConfigError, match="found no layers in `Linear`"):
        recompute(nn.Linear(2, 2), read_recomputing({}))


def test_the_trainer_does_it(tmp_path):
    class Guess(Stack):
        def forward(self, x, labels):
            return {"loss": (super().forward(x).sum(1) - labels).square().mean()}

    data = [{"x": torch.randn(4), "labels": torch.tensor(1.0)} for _ in range(8)]
    with pytest.warns(FutureWarning, match="activation_checkpointing"):
        args = TrainingArguments(
            str(tmp_path),
            gradient_checkpointing=True,
            max_steps=1,
            save_strategy="no",
            use_cpu=True,
        )
    model = Guess()
    Trainer(model, args, train_dataset=data).train()
    assert model.blocks[0][0].calls == 2
