"""Memory: measured by stages, given back, watched; and the profiler's hook."""

from __future__ import annotations

import pytest
import torch

from resilient.errors import ConfigError
from resilient.train import memory
from resilient.train.arguments import TrainingArguments
from resilient.train.build_run import default_callbacks
from resilient.train.callbacks import builtin
from resilient.train.callbacks.builtin import (
    EmptyCacheCallback,
    MemoryWatchCallback,
    ProfilerCallback,
)
from resilient.train.memory import MemoryMeter, empty_cache, resident_bytes, used_share
from tests.unit.train.models import make_trainer

CPU = torch.device("cpu")
LARGE_BYTES = 64 << 20


def large():
    return torch.ones(LARGE_BYTES, dtype=torch.uint8)


def test_a_stage_tells_what_it_kept_and_what_it_needed_for_a_moment():
    meter = MemoryMeter(CPU, is_on=True)
    meter.start("train")
    kept = large()
    moment = large()
    del moment
    figures = meter.stop("train")
    assert figures.keys() == {"train_mem_cpu_alloc_delta", "train_mem_cpu_peaked_delta"}
    about = pytest.approx(LARGE_BYTES, rel=0.3)
    assert figures["train_mem_cpu_alloc_delta"] == about
    assert figures["train_mem_cpu_peaked_delta"] == about
    assert kept.sum() == LARGE_BYTES


class Pretended:
    """The part of an accelerator's module that is asked for memory."""

    def __init__(self):
        self.now = self.peak = 100

    def memory_allocated(self, _device):
        return self.now

    def max_memory_allocated(self, _device):
        return self.peak

    def reset_peak_memory_stats(self):
        self.peak = self.now


def test_an_accelerator_has_figures_of_its_own():
    meter = MemoryMeter(CPU, is_on=True)
    meter._module = device = Pretended()
    meter.start("eval")
    device.peak, device.now = 900, 300
    figures = meter.stop("eval")
    assert figures["eval_mem_gpu_alloc_delta"] == 200
    assert figures["eval_mem_gpu_peaked_delta"] == 600


@pytest.mark.slow
def test_runs_tell_them_if_asked_and_the_history_never_does(tmp_path, repository):
    trainer = make_trainer(
        tmp_path,
        skip_memory_metrics=False,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        eval_size=8,
    )
    metrics = trainer.train().metrics
    assert {"train_mem_cpu_alloc_delta", "train_mem_cpu_peaked_delta"} <= metrics.keys()
    assert metrics["before_init_mem_cpu"] > 0
    assert "init_mem_cpu_alloc_delta" in metrics
    # Inside training nothing else is measured, as it would spoil the peak.
    assert not any("_mem_" in name for entry in trainer.state.log_history for name in entry)
    assert "eval_mem_cpu_peaked_delta" in trainer.evaluate()
    assert "test_mem_cpu_alloc_delta" in trainer.predict(trainer.eval_dataset).metrics


def test_by_default_nothing_is_measured(tmp_path, repository):
    metrics = make_trainer(tmp_path, max_steps=2).train().metrics
    assert not any("_mem_" in name for name in metrics)


@pytest.mark.parametrize("device", ["cuda", "mps", "xpu", "npu", "hpu", "mlu", "musa"])
def test_each_kind_of_device_empties_its_own_cache(monkeypatch, device):
    emptied = []
    module = type("Module", (), {"empty_cache": staticmethod(lambda: emptied.append(device))})
    monkeypatch.setattr(torch, device, module, raising=False)
    empty_cache(type("Device", (), {"type": device})())
    assert emptied == [device]


def test_what_is_unreachable_is_freed():
    class Knot:
        pass

    knot = Knot()
    knot.me, knot.tensor = knot, large()
    before = resident_bytes()
    del knot
    empty_cache(CPU, collect=True)
    assert before - resident_bytes() > LARGE_BYTES / 2


def test_the_cache_is_emptied_at_the_steps_that_are_due(tmp_path, repository, monkeypatch):
    seen = []
    monkeypatch.setattr(
        builtin, "empty_cache", lambda device: seen.append(trainer.state.global_step)
    )
    trainer = make_trainer(tmp_path, torch_empty_cache_steps=3, max_steps=7)
    trainer.train()
    assert seen == [3, 6]
    assert EmptyCacheCallback not in default_callbacks(TrainingArguments(), [])


@pytest.mark.parametrize(("high", "freed"), [(0.0, [2, 4]), (1.0, [])])
def test_memory_is_watched_and_freed_when_it_is_nearly_used_up(
    tmp_path, repository, capsys, high, freed
):
    trainer = make_trainer(tmp_path, callbacks=[MemoryWatchCallback(2, high)], max_steps=4)
    trainer.train()
    assert capsys.readouterr().err.count("freed memory:") == len(freed)


def test_the_share_that_is_used_is_one(monkeypatch):
    assert 0 < used_share(CPU) < 1
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: None)
    assert used_share(CPU) == 0
    with pytest.raises(ConfigError, match="a share from 0 to 1"):
        MemoryWatchCallback(high=1.5)


def test_the_values_that_the_field_recommends_train(tmp_path, repository):
    options = {
        "torch_empty_cache_steps": 2,
        "dataloader_pin_memory": True,
        "dataloader_num_workers": 1,
        "dataloader_persistent_workers": True,
        "skip_memory_metrics": True,
    }
    assert make_trainer(tmp_path, max_steps=3, **options).train().global_step == 3


def test_a_profile_goes_with_the_steps(tmp_path, repository):
    ready = []
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda one: ready.append(one.key_averages()),
        profile_memory=True,
    )
    make_trainer(tmp_path, callbacks=[ProfilerCallback(profiler)], max_steps=5).train()
    assert len(ready) == 1
    assert any(one.key == "aten::addmm" for one in ready[0])
