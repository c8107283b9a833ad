"""auto_find_batch_size: out of memory costs a step's time, and neither samples nor bits."""

from __future__ import annotations

import math

import pytest
import torch

from resilient.errors import ConfigError
from resilient.train import auto_batch_size, session
from resilient.train.arguments import TrainingArguments
from resilient.train.data.ordering import epoch_order
from resilient.train.trainer import Trainer
from tests.unit.train.fakes import MemoryRepository, equal
from tests.unit.train.models import DieAfter, Dies, Net, Noisy
from tests.unit.train.test_resume import comparable

# More than any machine has.
ABSURD_BYTES = 1 << 60


def run_out(_kind):
    """Ask the CPU's allocator for what it does not have."""
    torch.empty(ABSURD_BYTES, dtype=torch.uint8)


def as_an_accelerator(_kind):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Tight(Net):
    """Runs out of memory with more than ``most`` samples, from its n-th pass on."""

    def __init__(self, most, since=0, fail=run_out):
        super().__init__()
        self.most, self.since, self.fail = most, since, fail
        self.passes = 0

    def forward(self, x, labels=None):
        self.passes += 1
        # Running statistics move and dropout is drawn before it fails.
        made = super().forward(x, labels) if len(x) > 1 else None
        if self.passes > self.since and len(x) > self.most:
            self.fail(self)
        return made


class Remembers(Trainer):
    """Knows which samples each finished step was made of."""

    def training_step(self, model, inputs):
        index = inputs.pop("index").tolist()
        loss = super().training_step(model, inputs)
        self.now = [*getattr(self, "now", []), *index]
        self.losses = [*getattr(self, "losses", []), loss.item()]
        return loss


class Indexed(Noisy):
    def __getitem__(self, index):
        return {**super().__getitem__(index), "index": index}


def trainer_of(folder, model, *, callbacks=(), **options):
    options = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 16,
        "auto_find_batch_size": True,
        "learning_rate": 0.05,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "save_steps": 2,
        "disable_tqdm": True,
        **options,
    }
    data = Indexed(50)
    args = TrainingArguments(**options)
    return Remembers(model, args, train_dataset=data, callbacks=callbacks)


@pytest.mark.parametrize("fail", [run_out, as_an_accelerator])
def test_the_batch_is_halved_until_it_fits_and_every_sample_is_trained_on_once(
    tmp_path, repository, capsys, fail
):
    trainer = trainer_of(tmp_path, Tight(5, fail=fail))
    trainer.train()
    assert trainer.state.train_batch_size == 4
    assert trainer.now == epoch_order(50, 42, 0).tolist()
    assert trainer.state.global_step == trainer.state.max_steps == math.ceil(50 / 4)
    assert trainer.state.epoch == 1.0
    said = capsys.readouterr().err
    assert "out of memory with 16 samples per device" in said
    assert "out of memory with 8 samples per device" in said


def test_a_step_that_failed_leaves_no_trace(tmp_path, repository):
    """Dropout, augmentation, running statistics and losses are those of the size that fits."""
    found = trainer_of(tmp_path, Tight(5), gradient_accumulation_steps=2)
    found.train()
    first = comparable(repository)
    repository.checkpoints.clear()
    told = trainer_of(
        tmp_path,
        Net(),
        gradient_accumulation_steps=2,
        per_device_train_batch_size=4,
        auto_find_batch_size=False,
    )
    told.train()
    second = comparable(repository)
    # How lengths are grouped goes by the size that was asked for.
    assert (first[1]["data"].pop("group"), second[1]["data"].pop("group")) == (32, 8)
    assert equal(first[1], second[1])
    assert found.state == told.state


def test_memory_that_runs_out_later_keeps_the_position(tmp_path, repository):
    """The first step is of 2 x 8; the second pass of the second one fails."""
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 8}
    trainer = trainer_of(tmp_path, Tight(4, since=3), **options)
    trainer.train()
    order = epoch_order(50, 42, 0).tolist()
    # What the failed step had trained on before it failed is trained on again, in its place.
    assert trainer.now == order[:24] + order[16:]
    assert trainer.state.train_batch_size == 4
    assert trainer.state.global_step == 1 + math.ceil(math.ceil(34 / 4) / 2)
    # The loss of the pass that was made before it failed is forgotten.
    assert trainer.state.log_history[1]["loss"] == sum(trainer.losses[3:5])
    assert trainer.state.epoch == 1.0


def through(folder, deaths, **options):
    repository = MemoryRepository()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "open_engine", repository.open)
        for step in deaths:
            with pytest.raises(Dies):
                trainer_of(folder, Tight(5), callbacks=[DieAfter(step)], **options).train()
        # A machine with more memory goes on with what was found, too.
        last = trainer_of(folder, Tight(5 if not deaths else 99), **options)
        last.train()
    return last, comparable(repository)


@pytest.mark.slow
def test_what_was_found_is_resumed_bit_for_bit(tmp_path):
    unbroken, whole = through(tmp_path, [])
    broken, repaired = through(tmp_path, [3, 9])
    assert equal(whole[1], repaired[1])
    assert unbroken.state == broken.state
    assert broken.model.passes == math.ceil(50 / 4) - 8


def test_a_size_that_is_told_anew_counts(tmp_path, repository):
    with pytest.raises(Dies):
        trainer_of(tmp_path, Tight(5), callbacks=[DieAfter(4)]).train()
    trainer = trainer_of(tmp_path, Tight(99), per_device_train_batch_size=8)
    trainer.train()
    assert trainer.state.train_batch_size == 8
    assert trainer.state.global_step == 4 + math.ceil((50 - 16) / 8)


def test_a_single_sample_that_does_not_fit_ends_training(tmp_path, repository):
    with pytest.raises(RuntimeError, match="allocate memory") as raised:
        trainer_of(tmp_path, Tight(0), per_device_train_batch_size=1).train()
    assert raised.value.__notes__ == ["a batch of one sample does not fit either"]


def test_other_errors_and_other_runs_are_left_alone(tmp_path, repository):
    def wrong(_kind):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        trainer_of(tmp_path, Tight(5, fail=wrong)).train()
    with pytest.raises(RuntimeError, match="allocate memory"):
        trainer_of(tmp_path, Tight(5), auto_find_batch_size=False).train()


def test_what_is_out_of_memory():
    said = [
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate"
            " memory: you tried to allocate 9 bytes."
        ),
        RuntimeError("MPS backend out of memory"),
    ]
    assert all(map(auto_batch_size.is_out_of_memory, said))
    assert not auto_batch_size.is_out_of_memory(ValueError("out of memory"))


def test_ranks_that_compute_together_are_refused():
    args = TrainingArguments(auto_find_batch_size=True)
    strategy = type("Sharded", (), {"name": "fsdp"})()
    with pytest.raises(ConfigError, match="but fsdp is neither"):
        auto_batch_size.batch_size_search_for(args, strategy, Net(), None)
    args = TrainingArguments(auto_find_batch_size=True, ddp_comm_hook="fp16")
    strategy = type("Replicas", (), {"name": "ddp"})()
    with pytest.raises(ConfigError, match="use one of them"):
        auto_batch_size.batch_size_search_for(args, strategy, Net(), None)
