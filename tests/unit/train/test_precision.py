"""Mixed precision in the loop: what computes in which dtype, and what fp16's scaler does."""

from __future__ import annotations

import pytest
import torch

from resilient.train.callbacks.base import TrainerCallback
from resilient.train.trainer import Trainer
from tests.unit.train.fakes import equal
from tests.unit.train.models import DieAfter, Dies, make_trainer

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
OVERFLOWS_AT = 2
FIRST_SCALE = 65536.0


class Overflows(Trainer):
    """The gradients of one step are too big for a scaled loss; before scaling they are finite."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs)
        return loss * 1e36 if self.state.global_step == OVERFLOWS_AT else loss


class Watches(TrainerCallback):
    """Notes after each step how far the schedule is, the scale, and whether weights moved."""

    def __init__(self, trainer=None):
        self.trainer, self.before = trainer, None
        self.schedule, self.scales, self.moved = [], [], []

    def on_step_begin(self, args, state, control, /, model=None, **_):
        self.before = [one.clone() for one in model.parameters()]

    def on_step_end(self, args, state, control, /, model=None, lr_scheduler=None, **_):
        self.moved.append(not all(map(torch.equal, self.before, model.parameters())))
        self.schedule.append(lr_scheduler.last_epoch)
        self.scales.append(self.trainer.precision.scaler.get_scale())


def overflowing(folder, callbacks=(), **options):
    watch = Watches()
    options = {"fp16": True, "max_steps": 5, "save_steps": 1, **options}
    trainer = make_trainer(folder, kind=Overflows, callbacks=[*callbacks, watch], **options)
    watch.trainer = trainer
    return trainer, watch


@pytest.mark.parametrize("name", [None, *DTYPES])
def test_layers_compute_in_the_dtype_and_weights_stay_whole(tmp_path, repository, name):
    trainer = make_trainer(tmp_path, max_steps=2, eval_size=4, **({name: True} if name else {}))
    seen = []
    trainer.model.layers[0].register_forward_hook(
        lambda module, _, outputs: seen.append(
            (module.training, outputs.dtype, module.weight.dtype, torch.is_grad_enabled())
        )
    )
    trainer.train()
    trainer.evaluate()
    dtype = DTYPES.get(name, torch.float32)
    assert set(seen) == {
        (True, dtype, torch.float32, True),
        (False, dtype, torch.float32, False),
    }
    assert {one.dtype for one in trainer.model.parameters()} == {torch.float32}


def test_a_step_that_overflows_is_left_out_and_the_schedule_waits(tmp_path, repository):
    trainer, watch = overflowing(tmp_path)
    trainer.train()
    assert watch.moved == [True, True, False, True, True]
    assert watch.schedule == [1, 2, 2, 3, 4]
    assert watch.scales == [FIRST_SCALE] * 2 + [FIRST_SCALE / 2] * 3
    assert trainer.state.global_step == 5


def test_the_scale_is_in_the_checkpoint_and_goes_on(tmp_path, repository):
    with pytest.raises(Dies):
        overflowing(tmp_path, [DieAfter(3)])[0].train()
    saved = repository.checkpoints[max(repository.checkpoints)]["scaler"]
    assert saved["scale"] == FIRST_SCALE / 2
    trainer, watch = overflowing(tmp_path)
    trainer.train()
    assert watch.scales == [FIRST_SCALE / 2] * 2
    assert watch.schedule == [3, 4]
    whole, _ = overflowing(tmp_path / "whole")
    whole.train(resume_from_checkpoint=False)
    assert equal(trainer.model.state_dict(), whole.model.state_dict())


@pytest.mark.parametrize("options", [{}, {"bf16": True}])
def test_only_fp16_has_a_scaler(tmp_path, repository, options):
    trainer = make_trainer(tmp_path, max_steps=1, **options)
    trainer.train()
    assert trainer.precision.scaler is None
    assert "scaler" not in repository.checkpoints[max(repository.checkpoints)]


def test_a_run_that_goes_over_to_fp16_begins_its_scale_and_says_so(tmp_path, capsys):
    make_trainer(tmp_path, max_steps=2).train()
    capsys.readouterr()
    trainer = make_trainer(tmp_path, max_steps=4, fp16=True)
    trainer.train()
    said = capsys.readouterr().err
    assert "fp16 False -> True: values are computed in another way; the scale of the loss" in said
    assert "not in the checkpoint, started from their initial state: scaler" in said
    assert trainer.state.global_step == 4
    assert trainer.precision.scaler.get_scale() == FIRST_SCALE
    back = make_trainer(tmp_path, max_steps=6)
    back.train()
    assert back.state.global_step == 6
