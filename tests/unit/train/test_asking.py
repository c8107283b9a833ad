"""What scripts ask a trainer, by the names of the field."""

import pytest
import torch

from resilient import TrainerCallback
from tests.unit.train.models import make_trainer


class Quiet(TrainerCallback):
    pass


def test_a_script_may_ask_what_it_asks_of_the_fields_trainer(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=2, learning_rate=0.25)
    with pytest.raises(ValueError, match="no optimizer before training"):
        trainer.get_learning_rates()
    assert trainer.is_world_process_zero()
    assert trainer.is_local_process_zero()
    loader = trainer.get_eval_dataloader(trainer.train_dataset)
    assert trainer.num_examples(loader) == len(trainer.train_dataset)
    del loader
    assert trainer.num_examples([0, 1, 2]) == 3 * trainer.args.per_device_train_batch_size
    numbers = sum(one.numel() for one in trainer.model.parameters())
    assert trainer.get_num_trainable_parameters() == numbers
    next(trainer.model.parameters()).requires_grad_(False)
    assert trainer.get_num_trainable_parameters() < numbers
    model = torch.nn.ModuleDict({"one": torch.nn.Linear(2, 2), "ln": torch.nn.LayerNorm(2)})
    assert trainer.get_decay_parameter_names(model) == ["one.weight"]
    trainer.train()
    assert len(trainer.get_learning_rates()) == len(trainer.optimizer.param_groups)


def test_optimizer_group_of_parameter(tmp_path, repository):
    trainer = make_trainer(tmp_path, max_steps=2)
    with pytest.raises(ValueError, match="no optimizer before training"):
        trainer.get_optimizer_group()
    trainer.create_optimizer()
    groups = trainer.optimizer.param_groups
    weight = trainer.model.layers[0].weight
    assert trainer.get_optimizer_group(weight) is groups[0]
    assert trainer.get_optimizer_group(trainer.model.layers[0].bias) is groups[1]
    assert [len(one) for one in trainer.get_optimizer_group()] == [len(g["params"]) for g in groups]


def test_a_callback_is_removed_by_itself_or_by_its_class(tmp_path):
    with pytest.warns(UserWarning, match="two callbacks of the class `Quiet`"):
        trainer = make_trainer(tmp_path, callbacks=[Quiet, own := Quiet()])
    assert trainer.callback_handler.callback_list.split("\n")[-2:] == ["Quiet", "Quiet"]
    trainer.remove_callback(own)
    assert sum(type(one) is Quiet for one in trainer.callback_handler.callbacks) == 1
    trainer.remove_callback(Quiet)
    trainer.remove_callback(Quiet)
    assert not any(type(one) is Quiet for one in trainer.callback_handler.callbacks)


def test_the_best_checkpoint_is_where_its_weights_can_be_loaded_from(tmp_path):
    how = {"eval_strategy": "steps", "eval_steps": 4, "eval_size": 7, "max_steps": 12}
    trainer = make_trainer(tmp_path, load_best_model_at_end=True, **how)
    assert trainer.best_checkpoint == ""
    trainer.train()
    assert trainer.best_checkpoint.endswith(f"{trainer.state.best_model_checkpoint}-g1")
    best = {name: one.clone() for name, one in trainer.model.state_dict().items()}
    again = make_trainer(tmp_path / "other", **how)
    assert again.load_model(trainer.best_checkpoint) == f"{trainer.state.best_model_checkpoint}-g1"
    assert all(torch.equal(one, best[name]) for name, one in again.model.state_dict().items())
