"""Stock Transformers goes on from what we export, with our losses to the bit."""

from __future__ import annotations

import json

import pytest
import torch

from resilient.errors import ConfigError, IncompatibleCheckpoint
from resilient.train.hf_interop import exporter
from resilient.train.hf_interop.checkpoint import TransformersCheckpoint
from resilient.train.hf_interop.exporter import export_checkpoint
from tests.helpers.hf_runs import BASE, CASES, Line, Numbers, Tokens, gpt2, make, stack
from tests.unit.train.models import make_trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


@pytest.fixture(autouse=True)
def one_thread():
    """Compare sums that were made in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stock(case, folder, **more):
    """Return a Trainer of Transformers of a recorded case that records its losses."""
    from transformers import Trainer, TrainingArguments

    class Stock(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            indices = inputs.pop("idx").tolist()
            loss = super().training_step(model, inputs, num_items_in_batch)
            seen.append((indices, float(loss).hex()))
            return loss

        def prediction_step(self, model, inputs, *more, **named):
            inputs.pop("idx", None)
            return super().prediction_step(model, inputs, *more, **named)

    seen = []
    (size, held), given = CASES[case]
    is_gpt2 = case.startswith("gpt2")
    data, seeds = (Tokens, (1, 2)) if is_gpt2 else (Numbers, (3, 4))
    given = {**BASE, **given, "output_dir": str(folder), "report_to": "none", **more}
    args = TrainingArguments(**given)
    trainer = Stock(
        gpt2() if is_gpt2 else Line(),
        args,
        data_collator=stack,
        train_dataset=data(size, seeds[0]),
        eval_dataset=data(held, seeds[1]) if held else None,
    )
    return trainer, seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "steps"), [("gpt2_all", [8, 16]), ("gpt2_ga_uneven", [6]), ("reg_sgd", [21])]
)
def test_stock_transformers_goes_on_with_our_losses(tmp_path, case, steps):
    ours = make(case, tmp_path / "ours", random_numbers="transformers")
    ours.train()
    each = CASES[case][1].get("gradient_accumulation_steps", 1)
    for step in steps:
        folder = tmp_path / f"from-{step}" / f"checkpoint-{step}"
        exported = export_checkpoint(str(tmp_path / "ours"), folder, f"step:{step}")
        assert exported.step == step
        trainer, seen = stock(case, folder.parent)
        ended = trainer.train(resume_from_checkpoint=str(folder))
        assert ended.global_step == ours.state.global_step
        assert seen == ours.seen[len(ours.seen) - len(seen) :]
        assert len(seen) >= (ours.state.global_step - step) * each - each
        weights = ours.model.state_dict()
        assert all(torch.equal(one, weights[n]) for n, one in trainer.model.state_dict().items())
        rates = [one["learning_rate"] for one in ours.state.log_history if "loss" in one]
        theirs = [one for one in trainer.state.log_history if "loss" in one]
        assert rates == [one["learning_rate"] for one in theirs]


def test_a_run_goes_there_and_back(tmp_path):
    whole = make("reg_sgd", tmp_path / "whole", random_numbers="transformers")
    whole.train()
    export_checkpoint(str(tmp_path / "whole"), tmp_path / "checkpoint-14", "step:14")
    back = make("reg_sgd", tmp_path / "back")
    back.train(tmp_path / "checkpoint-14")
    assert back.seen == whole.seen[14:]


def test_fp16_on_a_cpu_goes_there_and_back(tmp_path):
    """On a CPU Transformers has no scaler: it fails at the file of one."""
    ours = make("reg_sgd", tmp_path / "ours", fp16=True, random_numbers="transformers")
    ours.train()
    folder = tmp_path / "theirs" / "checkpoint-14"
    export_checkpoint(str(tmp_path / "ours"), folder, "step:14")
    trainer, _ = stock("reg_sgd", folder.parent, fp16=True)
    ended = trainer.train(resume_from_checkpoint=str(folder))
    assert ended.global_step == ours.state.global_step
    # Some steps were left out, which only a scaler does.
    assert TransformersCheckpoint(folder).load("scheduler.pt")["last_epoch"] < 14
    back = make("reg_sgd", tmp_path / "back", fp16=True)
    back.train(folder)
    assert back.seen == ours.seen[14:]


def test_the_scale_of_a_gpu_is_exported():
    draft = {"scaler": {"scale": 8.0}, "rng_state_0": {"torch": torch.zeros(1)}}
    assert not exporter._is_of_gpu(draft)
    assert exporter._is_of_gpu({**draft, "rng_state_1": {"cuda": [torch.zeros(1)]}})


def test_our_random_numbers_are_our_own_unless_asked(tmp_path):
    own = make("reg_sgd", tmp_path / "own", max_steps=21, num_train_epochs=3)
    own.train()
    asked = make(
        "reg_sgd",
        tmp_path / "asked",
        max_steps=21,
        num_train_epochs=3,
        random_numbers="transformers",
    )
    asked.train()
    assert [one for one, _ in own.seen] == [one for one, _ in asked.seen]
    assert own.seen[0] != asked.seen[0]


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Return a repository of a run whose model has tied weights and whose callback has state."""
    from resilient.train.callbacks.base import EarlyStoppingCallback

    folder = tmp_path_factory.mktemp("run")
    watch = EarlyStoppingCallback(7, 0.5)
    make("gpt2_all", folder, max_steps=8, callbacks=[watch]).train()
    return folder


def test_the_folder_holds_what_theirs_do(repository, tmp_path):
    export_checkpoint(str(repository), tmp_path / "checkpoint-8")
    found = TransformersCheckpoint(tmp_path / "checkpoint-8")
    names = found.weights()
    assert "transformer.wte.weight" in names
    assert "lm_head.weight" not in names
    assert sorted(one.name for one in found.folder.iterdir()) == [
        *("config.json", "generation_config.json", "model.safetensors", "optimizer.pt"),
        *("rng_state.pth", "scheduler.pt", "trainer_state.json"),
    ]
    assert len(found.state) == 20
    watched = found.state["stateful_callbacks"]["EarlyStoppingCallback"]
    assert watched["args"] == {"early_stopping_patience": 7, "early_stopping_threshold": 0.5}
    assert set(watched["attributes"]) == {"early_stopping_patience_counter"}
    assert found.state["stateful_callbacks"]["TrainerControl"]["args"]["should_save"] is False
    assert found.state["best_model_checkpoint"] == str(tmp_path / "checkpoint-8")


def test_it_loads_as_a_model(repository, tmp_path):
    from transformers import AutoModelForCausalLM

    export_checkpoint(str(repository), tmp_path / "there")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "there")
    own = TransformersCheckpoint(tmp_path / "there").weights()
    assert torch.equal(loaded.lm_head.weight, own["transformer.wte.weight"])


def test_a_folder_that_is_there_is_left_alone(repository, tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        export_checkpoint(str(repository), tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_step_that_would_be_another_sample_there_is_refused(tmp_path):
    make_trainer(tmp_path / "out", max_steps=4, save_steps=2).train()
    make_trainer(tmp_path / "out", max_steps=6, per_device_train_batch_size=8).train()
    export_checkpoint(str(tmp_path / "out"), tmp_path / "before", "step:4")
    with pytest.raises(IncompatibleCheckpoint, match="would continue at another data position"):
        export_checkpoint(str(tmp_path / "out"), tmp_path / "after", "step:6")
    assert not (tmp_path / "after").exists()


def test_what_no_trainer_saved_cannot_be_exported(tmp_path):
    from resilient import Checkpointer

    with Checkpointer(tmp_path / "loop", model=Line()) as checkpointer:
        checkpointer.resume()
        checkpointer.save(1)
    with pytest.raises(IncompatibleCheckpoint, match="holds no `optimizer`"):
        export_checkpoint(str(tmp_path / "loop"), tmp_path / "there")


@pytest.mark.parametrize(
    ("names", "decay", "place"), [(["a.bias"], 0.0, 1), (["a.weight"], 0.0, 0)]
)
def test_a_group_that_is_empty_is_there_all_the_same(names, decay, place):
    group = {"params": names, "weight_decay": decay, "lr": 0.5}
    made = exporter.optimizer_by_position(
        {"state": {names[0]: {"step": 3}}, "param_groups": [group]}
    )
    assert [one["params"] for one in made["param_groups"]][place] == [0]
    assert made["state"] == {0: {"step": 3}}
    rates = exporter.scheduler_by_group({"base_lrs": [0.5], "last_epoch": 3}, [group])
    assert rates == {"base_lrs": [0.5, 0.5], "last_epoch": 3}


def test_a_trainer_of_theirs_reads_every_field(repository, tmp_path):
    from transformers import TrainerState

    export_checkpoint(str(repository), tmp_path / "there")
    state = TrainerState.load_from_json(str(tmp_path / "there" / "trainer_state.json"))
    assert state.global_step == 8
    assert json.loads((tmp_path / "there" / "config.json").read_text())["model_type"] == "gpt2"
