"""A step as stock Transformers writes it, and the accelerator that it asks."""

from __future__ import annotations

import pytest
import torch

from resilient import Trainer
from resilient.errors import ConfigError
from tests.unit.train.models import make_trainer


class Stock(Trainer):
    """Makes its step in the words of Transformers' own ``training_step``."""

    joined = None

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        if (
            not self.model_accepts_loss_kwargs or num_items_in_batch is None
        ) and self.compute_loss_func is None:
            loss = loss / self.current_gradient_accumulation_steps
        kwargs = {}
        if self.accelerator.distributed_type == "DEEPSPEED":
            kwargs["scale_wrt_gas"] = False
        self.accelerator.backward(loss, **kwargs)
        self.joined = [*(self.joined or []), self.accelerator.sync_gradients]
        return loss.detach()


def trained(folder, kind, **options):
    trainer = make_trainer(folder, kind=kind, logging_steps=1, **options)
    trainer.train()
    return trainer


@pytest.mark.parametrize("precision", [{}, {"bf16": True}, {"fp16": True}], ids=str)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_step_of_stock_transformers_makes_the_same_bits(
    tmp_path, repository, precision, accumulation
):
    options = {**precision, "gradient_accumulation_steps": accumulation}
    own = trained(tmp_path / "own", Trainer, **options)
    repository.checkpoints.clear()
    stock = trained(tmp_path / "stock", Stock, **options)
    assert stock.state.log_history == own.state.log_history
    expected = own.model.state_dict()
    assert all(torch.equal(one, expected[name]) for name, one in stock.model.state_dict().items())
    if accumulation == 3:
        # 13 micro-batches of an epoch: the last step of it is short.
        assert stock.joined == [*([False, False, True] * 4), True] * 2


def test_it_answers_for_one_process(tmp_path, capsys):
    trainer = make_trainer(tmp_path, bf16=True)
    asked, one = trainer.accelerator, torch.tensor(3.0)
    assert (asked.num_processes, asked.process_index, asked.local_process_index) == (1, 0, 0)
    assert asked.is_main_process
    assert asked.is_local_main_process
    assert asked.device == trainer.args.device
    assert (asked.distributed_type, asked.mixed_precision) == ("NO", "bf16")
    assert asked.gather(one) is one
    assert asked.gather_for_metrics({"loss": one}) == {"loss": one}
    assert asked.unwrap_model(trainer.model) is trainer.model
    asked.wait_for_everyone()
    with asked.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
    capsys.readouterr()
    asked.print("a", 1)
    assert capsys.readouterr().out == "a 1\n"


def test_what_it_does_not_do_says_what_to_write(tmp_path):
    asked = make_trainer(tmp_path).accelerator
    with pytest.raises(AttributeError, match="set `max_grad_norm`"):
        asked.clip_grad_norm_(None, 1.0)
    assert not hasattr(asked, "free_memory")
    with pytest.raises(ConfigError, match="does not accept `retain_graph`"):
        asked.backward(torch.zeros(()), retain_graph=True)


def test_a_context_of_the_scripts_own_is_entered(tmp_path):
    class Mine(Trainer):
        entered = 0

        def autocast_smart_context_manager(self, cache_enabled=True):
            self.entered += 1
            return super().autocast_smart_context_manager(cache_enabled)

    assert trained(tmp_path, Mine, max_steps=2).entered == 2
