"""What arguments change in the process, the model, the loaders and the logs."""

from __future__ import annotations

import math

import pytest
import torch

from resilient.errors import ConfigError
from resilient.events import Level
from resilient.train import session
from resilient.train.arguments import TrainingArguments
from resilient.train.data.sampler import BatchLayout, DataCursor, ResumableSampler, train_loader
from resilient.train.meters import Meters
from resilient.train.trainer import Trainer
from tests.unit.train.models import make_trainer
from tests.unit.train.token_models import Mean

CPU = torch.device("cpu")


@pytest.fixture
def torch_as_before(monkeypatch):
    for name in session._DETERMINISTIC:
        monkeypatch.setenv(name, "")
    before = torch.are_deterministic_algorithms_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(before)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn


def test_full_determinism_refuses_what_is_not(tmp_path, repository, torch_as_before):
    make_trainer(tmp_path, full_determinism=True, max_steps=2).train()
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert session.os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_tf32_is_refused_where_there_is_none(tmp_path, repository):
    before = torch.backends.fp32_precision
    session.allow_tf32(CPU, is_allowed=False)
    assert torch.backends.fp32_precision == before
    with pytest.raises(ConfigError, match="`tf32`=True needs an NVIDIA GPU"):
        make_trainer(tmp_path, tf32=True, use_cpu=True)


@pytest.mark.parametrize("wanted", [False, True])
def test_a_model_keeps_keys_and_values_only_if_asked(tmp_path, repository, wanted):
    model = Mean()
    model.config = type("Config", (), {"use_cache": not wanted})()
    Trainer(model, TrainingArguments(str(tmp_path), use_cache=wanted))
    assert model.config.use_cache is wanted


@pytest.mark.parametrize(
    ("options", "rank", "shown"),
    [
        ({}, 0, Level.INFO),
        ({}, 1, Level.WARNING),
        ({"log_level": "error"}, 0, Level.ERROR),
        ({"log_level": "error"}, 1, Level.WARNING),
        ({"log_level": "debug", "log_level_replica": "info"}, 1, Level.INFO),
        ({"log_level_replica": "passive"}, 1, Level.WARNING),
    ],
)
def test_each_rank_shows_what_its_level_says(monkeypatch, options, rank, shown):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, str(rank))
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert TrainingArguments(**options).get_process_log_level() == shown


def test_a_quiet_run_shows_nothing_that_is_only_told(tmp_path, repository, capsys):
    make_trainer(tmp_path, log_level="warning", max_steps=2).train()
    assert capsys.readouterr().err == ""
    make_trainer(tmp_path, max_steps=2).train(False)
    assert "trained to step 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"logging_strategy": "no"}, []),
        ({"logging_strategy": "no", "logging_first_step": True}, [1]),
        ({"logging_strategy": "steps", "logging_steps": 5, "logging_first_step": True}, [1, 5, 10]),
        ({"logging_strategy": "steps", "logging_steps": 0.5}, [7]),
        ({"logging_strategy": "epoch"}, [13]),
    ],
)
def test_logs_fall_where_the_strategy_says(tmp_path, repository, options, steps):
    trainer = make_trainer(tmp_path, num_train_epochs=1, **options)
    trainer.train()
    assert [one["step"] for one in trainer.state.log_history if "loss" in one] == steps


@pytest.mark.parametrize(("asked", "on_gpu"), [(True, True), (True, False), (False, True)])
def test_batches_are_pinned_for_a_gpu_only(asked, on_gpu):
    sampler = ResumableSampler(DataCursor(8, 1), BatchLayout(8, 2, 1), 0)
    args = TrainingArguments(dataloader_pin_memory=asked)
    loader = train_loader(args, [1] * 8, sampler, list, pin=on_gpu)
    assert loader.pin_memory is (asked and on_gpu)


def test_prepare_inputs_is_overridden_for_training_and_evaluation(tmp_path, repository):
    class Doubles(Trainer):
        seen = 0

        def _prepare_inputs(self, inputs):
            self.seen += 1
            prepared = super()._prepare_inputs(inputs)
            return {**prepared, "x": prepared["x"] * 2}

    trainer = make_trainer(tmp_path, kind=Doubles, max_steps=2, eval_size=4)
    trainer.train()
    trainer.evaluate()
    assert trainer.seen == 3


def logged(losses, *, filters, accumulation=1):
    meters = Meters(CPU, 1, filters=filters)
    for at, loss in enumerate(losses, start=1):
        meters.add_loss(torch.tensor(loss))
        if at % accumulation == 0:
            meters.end_step(torch.tensor(0.0), 0.1)
    return meters.take()["loss"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_counts_as_the_mean_before_it(bad):
    """Transformers: `tr_loss += tr_loss / (1 + steps since the last log)`."""
    assert logged([1.0, 3.0, bad], filters=True) == (4 + 4 / 3) / 3
    assert logged([bad, 3.0], filters=True) == 1.5
    assert not math.isfinite(logged([1.0, 3.0, bad], filters=False))
    assert logged([1.0, bad, 2.0, 2.0], filters=True, accumulation=2) == (1 + 1 + 4) / 2


def test_the_filter_is_on_by_default_and_leaves_the_step_alone(tmp_path, repository):
    class Bad(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs)
            return loss * math.nan if self.state.global_step == 1 else loss

    trainer = make_trainer(tmp_path, kind=Bad, max_steps=2, logging_steps=1)
    trainer.train()
    first, second = (one for one in trainer.state.log_history if "loss" in one)
    assert (first["loss"] > 0, second["loss"]) == (True, 0.0)
    assert math.isnan(second["grad_norm"])
