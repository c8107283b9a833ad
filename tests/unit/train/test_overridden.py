"""What scripts override in Transformers' Trainer is called here, or refused."""

import inspect

import pytest
import torch

from resilient import Trainer
from resilient.errors import ConfigError
from resilient.train.hf_compat import ASKED, CALLED, NOT_CALLED
from tests.unit.train.models import make_trainer

# Of versions before the pinned one, or of their Seq2SeqTrainer.
ELSEWHERE = {
    *("prediction_loop", "_nested_gather", "_rotate_checkpoints", "propagate_args_to_deepspeed"),
    *("num_tokens", "_pad_tensors_to_max_len"),
}


class Called(Exception):
    """An override was called."""


def raises(*_given, **_named):
    raise Called


@pytest.mark.parametrize("name", NOT_CALLED)
def test_an_override_that_nothing_would_call_is_refused(name):
    kind = type("Mine", (type("Between", (Trainer,), {name: raises}),), {})
    with pytest.raises(ConfigError, match=f"Mine.{name}` would never be called") as caught:
        kind(None)
    assert caught.value.hint == NOT_CALLED[name]


@pytest.mark.parametrize("name", CALLED)
def test_an_override_that_is_accepted_is_called(tmp_path, name):
    kind = type("Mine", (Trainer,), {name: raises})
    trainer = make_trainer(tmp_path, kind=kind, max_steps=1, eval_size=8, eval_strategy="epoch")

    def whole():
        trainer.train()
        trainer.predict(trainer.eval_dataset)

    with pytest.raises(Called):
        whole()


def test_the_lists_hold_every_method_of_transformers():
    import transformers

    made = (staticmethod, classmethod, property)
    theirs = {
        name
        for name, one in vars(transformers.Trainer).items()
        if (inspect.isfunction(one) or isinstance(one, made)) and not name.startswith("__")
    }
    assert theirs == {*CALLED, *ASKED, *NOT_CALLED} - ELSEWHERE
    assert len({*CALLED, *ASKED, *NOT_CALLED}) == len(CALLED) + len(ASKED) + len(NOT_CALLED)


def test_an_override_that_is_called_is_none_of_them(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2


class Undecayed(Trainer):
    def get_decay_parameter_names(self, model):
        return [name for name, _ in model.named_parameters()][:1]


def test_what_decays_is_what_an_override_names(tmp_path):
    trainer = make_trainer(tmp_path, kind=Undecayed, weight_decay=0.1)
    groups = trainer.create_optimizer().param_groups
    first = next(trainer.model.parameters())
    assert [one["weight_decay"] for one in groups] == [0.1, 0.0]
    assert [id(one) for one in groups[0]["params"]] == [id(first)]
    everything = sum(len(one["params"]) for one in groups)
    assert everything == len(list(trainer.model.parameters()))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
def test_an_override_of_what_decays_is_refused_where_groups_are_others(tmp_path):
    trainer = make_trainer(tmp_path, kind=Undecayed, optim="muon")
    with pytest.raises(ConfigError, match="would have no effect: `muon` has its own groups"):
        trainer.create_optimizer()


def test_inputs_are_prepared_by_an_override_one_by_one(tmp_path):
    class Doubled(Trainer):
        def _prepare_input(self, data):
            prepared = super()._prepare_input(data)
            return prepared * 2 if isinstance(prepared, torch.Tensor) else prepared

    trainer = make_trainer(tmp_path, kind=Doubled)
    given = {"x": torch.ones(2), "more": [torch.ones(1), {"y": torch.ones(1)}]}
    made = trainer._prepare_inputs(given)
    assert made["x"].tolist() == [2.0, 2.0]
    assert [made["more"][0].item(), made["more"][1]["y"].item()] == [2.0, 2.0]
