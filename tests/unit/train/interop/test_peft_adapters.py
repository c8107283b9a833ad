"""Checkpoints of PEFT models: names and number of adapters, tied parameters, lost weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from resilient.errors import IncompatibleCheckpoint, IntegrityError
from resilient.layout_repair.plan import plan_layout_repair, write_repaired
from resilient.layouts.detect import read_layout
from resilient.layouts.resumability import assess_resumability
from resilient.storage.folder import open_folder
from resilient.train.arguments import TrainingArguments
from resilient.train.hf_interop.exporter import export_checkpoint
from resilient.train.hf_interop.rebuild import rebuild_folder
from resilient.train.trainer import Trainer
from tests.helpers.hf_runs import BASE, Tokens, gpt2, stack

pytestmark = pytest.mark.filterwarnings("ignore")  # of Transformers and PEFT
STEP = 4
PROMPT = 2
MODEL = "adapter_model.safetensors"


def lora(target="c_attn", **options):
    from peft import LoraConfig

    return LoraConfig(r=2, target_modules=[target], fan_in_fan_out=True, **options)


def adapted(config=None, name="default"):
    from peft import get_peft_model

    model = gpt2(dropout=0.0)
    torch.manual_seed(5)
    return get_peft_model(model, config or lora(), adapter_name=name)


def two():
    model = adapted()
    torch.manual_seed(6)
    model.add_adapter("second", lora("c_proj"))
    model.set_adapter("second")
    return model


def same_modules():
    model = adapted()
    torch.manual_seed(6)
    model.add_adapter("second", lora())
    model.set_adapter("second")
    return model


def prompt():
    from peft import PromptTuningConfig

    return adapted(PromptTuningConfig(num_virtual_tokens=PROMPT, task_type="CAUSAL_LM"))


MODELS = {
    "default": adapted,
    "named": lambda: adapted(name="mine"),
    "two": two,
    "same modules": same_modules,
    "prompt": prompt,
    "tokens": lambda: adapted(lora(trainable_token_indices={"transformer.wte": [1, 2, 3]})),
}


def collate(samples):
    batch = stack(samples)
    batch.pop("idx")
    return {name: rows[:, PROMPT:] for name, rows in batch.items()}


def options_of(folder, **options):
    return {**BASE, "max_steps": 8, "save_steps": STEP, "output_dir": str(folder), **options}


def stock(model, folder, **options):
    from transformers import Trainer as Stock
    from transformers import TrainingArguments as Theirs

    said = Theirs(**options_of(folder, report_to="none", **options))
    return Stock(model, said, train_dataset=Tokens(40, 1), data_collator=collate)


def ours(model, folder, **options):
    said = TrainingArguments(**options_of(folder, random_numbers="transformers", **options))
    return Trainer(model, said, train_dataset=Tokens(40, 1), data_collator=collate)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the folder and the final weights of an unbroken stock run of a model, by name."""
    made = {}

    def run_of(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            trainer = stock(MODELS[name](), folder)
            trainer.train()
            made[name] = folder / f"checkpoint-{STEP}", state_of(trainer)
        return made[name]

    return run_of


def state_of(trainer):
    return {name: one.detach().clone() for name, one in trainer.model.state_dict().items()}


def is_equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def copy_of(tmp_path, runs):
    """Return a copy of a stock run's checkpoint alone, to spoil."""

    def copy(name):
        return shutil.copytree(runs(name)[0], tmp_path / "theirs" / f"checkpoint-{STEP}")

    return copy


def verdict(path):
    folder = open_folder(str(path))
    contents = read_layout(folder, folder.list())
    return assess_resumability(contents, str(path))


def renamed(path, change):
    save_file({change(name): one for name, one in load_file(path).items()}, path, {"format": "pt"})


def without_prefix(name):
    return name.removeprefix("base_model.model.")


@pytest.mark.parametrize("name", MODELS)
def test_import_adapters_resumes_as_the_stock_trainer(tmp_path, runs, copy_of, name):
    folder, (_, unbroken) = copy_of(name), runs(name)
    assert verdict(folder).answer == "yes"
    trainer = ours(MODELS[name](), tmp_path / "out")
    trainer.train(str(folder))
    assert trainer.state.global_step == 8
    assert trainer.model.active_adapters == MODELS[name]().active_adapters
    assert is_equal(state_of(trainer), unbroken)


def test_import_default_adapter_in_a_subfolder_is_taken(tmp_path, runs, copy_of):
    folder = copy_of("default")
    (folder / "default").mkdir()
    for name in (MODEL, "adapter_config.json"):
        shutil.move(folder / name, folder / "default" / name)
    assert verdict(folder).answer == "yes"
    trainer = ours(adapted(), tmp_path / "out")
    trainer.train(str(folder))
    assert is_equal(state_of(trainer), runs("default")[1])


def test_import_adapter_alone_is_the_active_one_under_any_name(tmp_path, runs, copy_of):
    trainer = ours(adapted(name="mine"), tmp_path / "out")
    trainer.train(str(copy_of("default")))
    own = {name.replace(".mine.", ".default."): one for name, one in state_of(trainer).items()}
    assert is_equal(own, runs("default")[1])


def test_import_untrained_adapter_is_restored(tmp_path, copy_of):
    folder = copy_of("two")
    tensors = {name: one + 1 for name, one in load_file(folder / MODEL).items()}
    save_file(tensors, folder / MODEL, {"format": "pt"})
    trainer = ours(two(), tmp_path / "out")
    trainer.train(str(folder))
    own = state_of(trainer)
    for name, one in tensors.items():
        key = name.replace(".weight", ".default.weight")
        assert torch.equal(own[key], one)


@pytest.mark.parametrize(("name", "adapter"), [("named", "mine"), ("two", "second")])
def test_import_best_model_of_adapters_is_loaded_at_the_end(tmp_path, copy_of, name, adapter):
    folder = copy_of(name)
    best = shutil.copytree(folder, folder.with_name("checkpoint-2"))
    at = {"best_global_step": 2, "best_metric": 0.0, "best_model_checkpoint": str(best)}
    for path, step in ((best, 2), (folder, STEP)):
        state = json.loads((path / "trainer_state.json").read_text())
        text = json.dumps({**state, **at, "global_step": step})
        (path / "trainer_state.json").write_text(text)
    tensors = {key: one + 1 for key, one in load_file(best / adapter / MODEL).items()}
    save_file(tensors, best / adapter / MODEL, {"format": "pt"})
    evaluated = {"eval_strategy": "steps", "eval_steps": STEP, "load_best_model_at_end": True}
    trainer = ours(MODELS[name](), tmp_path / "out", **evaluated)
    trainer.eval_dataset = Tokens(4, 2)
    trainer.train(str(folder))
    own = state_of(trainer)
    for key, one in tensors.items():
        assert torch.equal(own[key.replace(".weight", f".{adapter}.weight")], one)


@pytest.mark.parametrize(
    ("name", "places"), [("named", ["mine"]), ("two", ["", "second"]), ("tokens", [""])]
)
def test_export_adapters_stock_trainer_resumes(tmp_path, name, places):
    whole = ours(MODELS[name](), tmp_path / "run")
    whole.train()
    out = tmp_path / "there" / f"checkpoint-{STEP}"
    export_checkpoint(str(tmp_path / "run"), out, f"step:{STEP}")
    files = sorted(path.relative_to(out) for path in out.rglob(MODEL))
    assert files == [Path(place, MODEL) for place in places]
    assert all((out / place / "adapter_config.json").exists() for place in places)
    trainer = stock(MODELS[name](), out.parent)
    trainer.train(resume_from_checkpoint=str(out))
    assert is_equal(state_of(trainer), state_of(whole))


def test_rebuild_keeps_the_folders_of_adapters(tmp_path, copy_of):
    folder = copy_of("named")
    (folder / "trainer_state.json").unlink()
    rebuild_folder(folder, tmp_path / "rebuilt" / folder.name)
    rebuilt = tmp_path / "rebuilt" / folder.name / "mine"
    assert sorted(path.name for path in rebuilt.iterdir()) == ["adapter_config.json", MODEL]


def test_import_all_adapter_weights_renamed_is_refused(tmp_path, copy_of):
    folder = copy_of("default")
    (folder / "adapter_config.json").unlink()
    renamed(folder / MODEL, without_prefix)
    with pytest.raises(IncompatibleCheckpoint, match="none of its weights, such as `transformer"):
        ours(adapted(), tmp_path / "out").train(str(folder))
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_import_weights_of_another_adapter_are_refused(tmp_path, copy_of):
    with pytest.raises(IncompatibleCheckpoint, match="belongs to an adapter of this model"):
        ours(adapted(lora("c_proj")), tmp_path / "out").train(str(copy_of("default")))


@pytest.mark.parametrize("strict", [False, True])
def test_import_part_of_adapter_weights_renamed_is_a_loss(tmp_path, copy_of, strict):
    folder = copy_of("default")
    renamed(folder / MODEL, lambda name: name.replace("h.0.attn", "h.0.attention"))
    trainer = ours(adapted(), tmp_path / "out", strict_resume=strict)
    if strict:
        with pytest.raises(IncompatibleCheckpoint, match="loss of 2 of 4 weights"):
            trainer.train(str(folder))
        return
    trainer.train(str(folder))
    events = "".join(path.read_text() for path in (tmp_path / "out").rglob("events/*.jsonl"))
    assert '"2 of 4 weights"' in events


def test_import_that_the_engine_could_not_resume_is_not_committed(tmp_path, copy_of, monkeypatch):
    """The tied names of a tensor get two values, as an import of an earlier version made them."""
    folder = copy_of("tokens")
    monkeypatch.setattr("resilient.train.hf_interop.conversion.tie", lambda tensors, _: {**tensors})
    with pytest.raises(IncompatibleCheckpoint, match="Nothing was committed"):
        ours(MODELS["tokens"](), tmp_path / "out").train(str(folder))
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_verify_renamed_weights_of_an_adapter_are_not_resumable(tmp_path, copy_of):
    folder = copy_of("named")
    renamed(folder / "mine" / MODEL, without_prefix)
    found = verdict(folder)
    assert found.answer == "no"
    assert "none of its weights has the prefix `base_model.`" in found.why[0]
    with pytest.raises(IntegrityError, match="none of its weights has the prefix"):
        ours(MODELS["named"](), tmp_path / "out").train(str(folder))


@pytest.mark.parametrize("name", ["default", "named", "two"])
@pytest.mark.parametrize(
    "change",
    [
        without_prefix,
        lambda name: f"module.{name}",
        lambda name: without_prefix(name) if ".h.0." in name else name,
    ],
    ids=["prefix", "wrapper", "part"],
)
def test_repair_renamed_weights_of_an_adapter_get_their_names(
    tmp_path, runs, copy_of, name, change
):
    folder = copy_of(name)
    for path in folder.rglob(MODEL):
        renamed(path, change)
    plan = plan_layout_repair(str(folder))
    assert (plan.is_whole, plan.verdict.answer) == (True, "yes")
    repaired = write_repaired(plan, tmp_path / "repaired" / folder.name)
    for path in runs(name)[0].rglob(MODEL):
        own = load_file(repaired / path.relative_to(runs(name)[0]))
        assert is_equal(own, load_file(path))


@pytest.mark.parametrize("has_neighbour", [False, True])
def test_repair_ambiguous_prefix_needs_another_step(copy_of, has_neighbour):
    """The base model may have a module `model`, as Llama has."""
    folder = copy_of("default")
    if has_neighbour:
        shutil.copytree(folder, folder.with_name("checkpoint-8"))
    renamed(folder / MODEL, lambda name: name.removeprefix("base_model."))
    plan = plan_layout_repair(str(folder))
    assert plan.is_whole is has_neighbour
    assert plan.is_hopeless is not has_neighbour
