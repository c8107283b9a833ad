"""Evaluation datasets by name, and processes that serve several evaluations."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils.data import Dataset

from resilient import TrainingArguments
from resilient.errors import ConfigError
from tests.unit.train.models import Net, Noisy, make_trainer


@pytest.fixture
def trainer(tmp_path, repository):
    made = make_trainer(tmp_path, per_device_eval_batch_size=8)
    made.eval_dataset = {"one": Noisy(32, augment=False), "two": Noisy(8, augment=False)}
    return made


def test_eval_loader_by_name_loads_that_dataset(trainer):
    loader = trainer.get_eval_dataloader("one")
    assert len(loader) == 4
    assert sum(len(batch["labels"]) for batch in loader) == 32


def test_evaluate_by_name_gives_plain_names(trainer):
    assert "eval_loss" in trainer.evaluate("two")
    every = trainer.evaluate()
    assert {"eval_one_loss", "eval_two_loss"} <= set(every)
    assert trainer.evaluate("two")["eval_loss"] == every["eval_two_loss"]
    given = trainer.evaluate({"three": Noisy(4, augment=False)})
    assert "eval_three_loss" in given


def test_eval_loader_unknown_name_refused(trainer):
    with pytest.raises(ConfigError, match=r"no dataset named `three`.*one, two"):
        trainer.get_eval_dataloader("three")
    trainer.eval_dataset = Noisy(4)
    with pytest.raises(ConfigError, match=r"no dataset named `three`.*none"):
        trainer.evaluate("three")


class Numbered(Dataset):
    """Samples that say which process loaded them."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"x": torch.full((6,), float(os.getpid())), "label": 0}


@pytest.mark.parametrize("persistent", [True, False])
def test_eval_workers_persist_between_evaluations(tmp_path, repository, persistent):
    trainer = make_trainer(
        tmp_path, dataloader_num_workers=1, dataloader_persistent_workers=persistent
    )
    trainer.eval_dataset = {"one": Numbered(4), "two": Numbered(6)}
    found = [next(iter(trainer.get_eval_dataloader("one")))["x"][0, 0].item() for _ in range(2)]
    assert (found[0] == found[1]) is persistent
    assert os.getpid() not in found
    if persistent:
        assert trainer.get_eval_dataloader("one") is trainer.get_eval_dataloader("one")
        assert trainer.get_eval_dataloader("two") is not trainer.get_eval_dataloader("one")
        one, other = Numbered(4), Numbered(6)
        # Transformers gives the first of them both times.
        assert len(trainer.get_eval_dataloader(one)) == 1
        assert len(trainer.get_eval_dataloader(other).dataset) == 6
    trainer._eval_loaders = ()


def test_eval_loader_draws_alike_with_persistent_workers(tmp_path, repository):
    def drawn(**options):
        trainer = make_trainer(tmp_path, random_numbers="transformers", max_steps=1, **options)
        trainer.train()
        torch.manual_seed(1)
        for _ in range(2):
            trainer.get_eval_dataloader(trainer.train_dataset)
        return torch.get_rng_state()

    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    assert torch.equal(drawn(), drawn(**workers))


def test_low_rank_targets_match_as_in_transformers():
    pytest.importorskip("galore_torch")
    from transformers.trainer_utils import check_target_module_exists

    from resilient.train.optimizers.third_party import target_weights

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(4, 4)})
            self.mlp = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(4, 4)})
            self.head = torch.nn.Linear(4, 1)

    model = Block()
    linear = {name: one for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    wishes = [["attn"], ["attn", "mlp"], ["proj"], ["q_proj"], ["h.*d"], "mlp.*", ["attn.q_proj"]]
    for wanted in wishes:
        args = TrainingArguments(optim="galore_adamw", optim_target_modules=wanted)
        theirs = {
            id(one.weight)
            for name, one in linear.items()
            if check_target_module_exists(wanted, name)
        }
        assert target_weights(args, model) == theirs, wanted


@pytest.mark.parametrize("wanted", ["all-linear", ["head"]], ids=str)
def test_low_rank_targets_of_tied_embeddings_are_those_of_transformers(wanted):
    pytest.importorskip("galore_torch")
    from transformers.trainer_optimizer import _setup_low_rank_optimizer

    from resilient.train.optimizers.third_party import target_weights

    model = torch.nn.ModuleDict(
        {"embedding": torch.nn.Embedding(4, 4), "up": torch.nn.Linear(4, 4)}
        | {"head": torch.nn.Linear(4, 4, bias=False)}
    )
    model["head"].weight = model["embedding"].weight
    args = TrainingArguments(optim="galore_adamw", optim_target_modules=wanted)
    _, theirs = _setup_low_rank_optimizer(
        args, model, "galore_adamw", {"galore_adamw": torch.optim.AdamW}, {}, {}
    )
    assert target_weights(args, model) == set(map(id, theirs["params"][1]["params"]))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_galore_groups_are_those_of_transformers(tmp_path, repository, weight_decay):
    pytest.importorskip("galore_torch")
    trainer = make_trainer(
        tmp_path,
        optim="galore_adamw",
        optim_target_modules=["layers.0"],
        weight_decay=weight_decay,
    )
    with pytest.warns(FutureWarning, match="deprecated"):
        trainer.create_optimizer()
    shown = [(one.get("rank"), len(one["params"])) for one in trainer.optimizer.param_groups]
    count = len([*Net().parameters()])
    # With a decay, the parameters that do not decay have a group of their own.
    assert shown == [(None, count - 1), (128, 1)] if not weight_decay else len(shown) == 3
    assert shown[-1] == (128, 1)
