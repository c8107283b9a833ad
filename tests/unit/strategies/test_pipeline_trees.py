"""Stages of a model, run one after another in one process: what the whole model computes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from resilient.errors import ConfigError
from resilient.strategies.activation_checkpointing import ActivationCheckpointing, recompute
from tests.helpers.stages import NTH, parts, run_stages


class Layer(nn.Module):
    kind = "full"

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.5)

    def forward(self, hidden, mask, scale=1.0):
        return hidden + self.drop(torch.tanh(self.linear(hidden))) * mask[..., None] * scale, None


class Words(nn.Module):
    """Looks at shapes and devices, makes masks of its samples, asks layers what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.places = nn.Embedding(8, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11)

    def forward(self, ids, labels=None):
        hidden = self.embed(ids)
        hidden = hidden + self.places(torch.arange(hidden.shape[1], device=hidden.device))
        mask = (ids > 0).to(hidden.dtype)
        for layer in self.layers:
            assert layer.kind == "full"
            hidden, _ = layer(hidden, mask, scale=0.5)
        logits = self.head(self.norm(hidden))
        return {"loss": logits.float().square().mean(), "logits": logits}


BATCH = {"ids": torch.tensor([[1, 2, 0], [3, 0, 0]])}


def run(model):
    return model(**BATCH)


@pytest.mark.parametrize("points", [["layers.2"], ["layers.1", "layers.2", "head"], ["norm"]])
def test_stages_compute_what_the_model_computes(points):
    model = Words().eval()
    made, _ = run_stages(model, points, run, BATCH)
    expected = model(**BATCH)
    assert torch.equal(made["logits"], expected["logits"])
    made["loss"].backward()
    found = {name: one.grad for name, one in model.named_parameters()}
    model.zero_grad()
    expected["loss"].backward()
    assert all(torch.equal(found[name], one.grad) for name, one in model.named_parameters())


def test_a_stage_runs_no_layer_of_another_and_draws_no_number_for_it():
    model = Words().train()
    calls = []
    for n, layer in enumerate(model.layers):
        layer.linear.register_forward_hook(lambda *_, n=n: calls.append(n))
    plan, stages = parts(model, ["layers.1", "layers.3"])
    before = torch.get_rng_state()
    shapes = plan.shapes(run, BATCH)
    assert shapes == (((2, 3, 6), torch.float32),) * 2
    assert torch.equal(torch.get_rng_state(), before), "to know shapes draws no random numbers"
    assert calls == []
    stages[1].shapes, stages[1].runs = shapes, (run,)
    torch.manual_seed(3)
    stages[1](torch.zeros(2, 3, 6), nth=NTH)
    assert calls == [1, 2]
    after = torch.get_rng_state()
    torch.manual_seed(3)
    for _ in range(2):
        nn.functional.dropout(torch.ones(2, 3, 6), 0.5)
    assert torch.equal(torch.get_rng_state(), after), "the dropout of two layers, and no more"


def test_stages_train_and_evaluate_when_the_model_does():
    model = Words()
    _, stages = parts(model, ["layers.2"])
    model.eval()
    shapes = (((2, 3, 6), torch.float32),)
    for stage in stages:
        stage.shapes, stage.runs = shapes, (lambda tree: tree.training,)
    assert stages[1](torch.zeros(2, 3, 6), nth=NTH) is False
    model.train()
    assert stages[1](torch.zeros(2, 3, 6), nth=NTH) is True
    assert all(one.training for one in stages[1].tree.modules())


def test_shapes_are_those_of_autocast():
    model = Words().eval()

    def lower(tree):
        with torch.autocast("cpu", torch.bfloat16):
            return tree(**BATCH)

    made, sent = run_stages(model, ["norm"], lower, BATCH)
    assert made["logits"].dtype == torch.bfloat16
    assert sent[0].dtype == torch.float32
    _, sent = run_stages(model, ["head"], lower, BATCH)
    assert sent[0].dtype == torch.float32


def test_layers_that_compute_again_are_cut_like_others():
    model = Words().eval()
    expected = copy.deepcopy(model)(**BATCH)["logits"]
    recompute(model, ActivationCheckpointing(options={"use_reentrant": False}))
    made, _ = run_stages(model, ["layers.2"], run, BATCH)
    assert torch.equal(made["logits"], expected)


class Skips(Words):
    def forward(self, ids, labels=None):
        first = hidden = self.embed(ids)
        for layer in self.layers:
            hidden, _ = layer(hidden, ids.float())
        return {"loss": self.head(hidden + first).mean()}


class GivesTwo(Words):
    def forward(self, ids, labels=None):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden, _ = layer(hidden, hidden.mean(-1))
        return {"loss": self.head(hidden).mean()}


class UsesTwice(Words):
    def forward(self, ids, labels=None):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden, _ = layer(hidden, ids.float())
        return {"loss": (hidden @ self.embed.weight.T).mean()}


class GoesBack(Words):
    def forward(self, ids, labels=None):
        hidden = self.head(self.embed(ids))[..., :6]
        for layer in self.layers:
            hidden, _ = layer(hidden, ids.float())
        return {"loss": hidden.mean()}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Skips, "a later stage of the pipeline uses a tensor of an earlier stage"),
        (GivesTwo, r"`layers\.2`, which starts a stage, needs a second tensor"),
        (UsesTwice, "a later stage of the pipeline uses a tensor of an earlier stage"),
        (GoesBack, "calls `head` before the module that starts its stage"),
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_model_that_one_tensor_between_stages_is_not_enough_for_is_refused(kind, said):
    with pytest.raises(ConfigError, match=said):
        run_stages(kind().eval(), ["layers.2"], run, BATCH)


def test_a_stage_that_is_never_reached_is_refused():
    class Short(Words):
        def forward(self, ids, labels=None):
            return {"loss": self.embed(ids).mean()}

    with pytest.raises(ConfigError, match=r"does not call `layers\.2` once each"):
        run_stages(Short(), ["layers.2"], run, BATCH)


def test_a_stage_that_would_be_sent_whole_numbers_is_refused():
    with pytest.raises(
        ConfigError, match="`places` starts a stage, but its first argument is not a tens"
    ):
        run_stages(Words(), ["places"], run, BATCH)


def test_a_loss_that_calls_the_model_twice_is_refused():
    def twice(tree):
        return tree(**BATCH)["loss"] + tree(**BATCH)["loss"]

    with pytest.raises(ConfigError, match="is called twice with one micro-batch"):
        run_stages(Words().eval(), ["layers.2"], twice, BATCH)


def test_shapes_that_depend_on_numbers_are_refused():
    class Packs(Words):
        def forward(self, ids, labels=None):
            hidden = self.embed(ids)
            hidden = hidden[: int(ids.max())] if ids.max() > 3 else hidden
            mask = torch.ones(hidden.shape[:2])
            for layer in self.layers:
                hidden, _ = layer(hidden, mask)
            return {"loss": self.head(hidden).mean()}

    model = Packs().eval()
    plan, stages = parts(model, ["layers.2"])
    many = {"ids": torch.full((6, 3), 5)}
    few = {"ids": torch.full((6, 3), 3)}
    stages[0].shapes = plan.shapes(lambda tree: tree(**few), few)
    stages[0].runs = (lambda tree: tree(**many),)
    with pytest.raises(ConfigError, match="shapes must not depend on values"):
        stages[0](nth=NTH)
