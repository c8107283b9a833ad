"""The examples of recipes learn, resume to the bit, and end as those who move over expect."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[3] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore")  # of Transformers, PEFT and scikit-learn
# Example -> steps, and what its last line must show.
RECIPES = {
    "distillation.py": (60, lambda said: float(said.split()[-1]) < 1.2),
    "adversarial.py": (60, lambda said: float(said.split()[2]) > 0.3),
    "multi_task.py": (
        60,
        lambda said: float(said.split()[0]) > 0.7 and float(said.split()[-1]) < 0.1,
    ),
    "contrastive.py": (40, lambda said: float(said.split()[2]) > 0.7),
    "lora.py": (40, lambda said: float(said.split()[1]) > float(said.split()[3])),
    "curves.py": (40, lambda said: json.loads(said.replace("'", '"'))["eval_accuracy"] > 0.7),
    "own_recipe.py": (40, lambda said: float(said.split()[-1]) < 1.2),
}
# Each view's partner is one of 128; to guess costs their logarithm, which is 4.85.
LOSSES = {"contrastive.py": 4.5}


def example(name, **changed):
    text = (EXAMPLES / name).read_text()
    for old, new in changed.get("lines", []):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, None))
    exec(compile(text, name, "exec"), module.__dict__)  # noqa: S102 - our own file
    return module


def bits(model):
    return {name: one.clone() for name, one in model.state_dict().items()}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_learns_and_goes_on_to_the_bit(tmp_path, capsys, name):
    steps, learned = RECIPES[name]
    main = example(name).main
    whole = main(str(tmp_path / "whole"), steps)
    said = capsys.readouterr().out.strip().splitlines()[-1]
    assert learned(said), said
    (loss,) = (one["train_loss"] for one in whole.state.log_history if "train_loss" in one)
    assert loss < LOSSES.get(name, float("inf"))
    main(str(tmp_path / "parts"), steps // 2)
    back = main(str(tmp_path / "parts"), steps)
    assert capsys.readouterr().out.strip().splitlines()[-1] == said
    assert back.state.global_step == whole.state.global_step == steps
    assert back.callback_handler.state_dict() == whole.callback_handler.state_dict()
    ended = bits(back.model)
    assert all(torch.equal(one, ended[key]) for key, one in bits(whole.model).items())


def test_the_moved_script_has_the_losses_that_it_had(tmp_path):
    ours = (
        "from resilient import Trainer, TrainingArguments  # 1: was `from transformers import ...`"
    )
    switch = '        random_numbers="transformers",  # 2: new, and only for the very same losses\n'
    theirs = [(ours, "from transformers import Trainer, TrainingArguments"), (switch, "")]
    moved = example("from_transformers.py").main(str(tmp_path / "ours"), 30)
    stayed = example("from_transformers.py", lines=theirs).main(str(tmp_path / "theirs"), 30)
    assert type(stayed).__module__.startswith("transformers")
    losses, were = (
        [one["loss"] for one in trainer.state.log_history if "loss" in one]
        for trainer in (moved, stayed)
    )
    assert len(losses) == 30
    assert losses == pytest.approx(were, rel=1e-6)  # they sum up losses in single precision
    assert all(torch.equal(one, bits(stayed.model)[key]) for key, one in bits(moved.model).items())


def test_a_student_is_taught(tmp_path):
    """By its teacher alone it learns too, and other things than from labels alone."""
    steps, share = 60, "TEMPERATURE, SHARE = 3.0, 0.7"
    losses = [
        example("distillation.py", lines=[(share, f"TEMPERATURE, SHARE = 3.0, {told}")])
        .main(str(tmp_path / told), steps)
        .evaluate()["eval_loss"]
        for told in ("1.0", "0.0")
    ]
    assert losses[0] != losses[1]
    assert losses[0] < 1.2, "of its teacher alone"
