"""`resilient train --adapter` makes an unchanged script of Transformers save and resume."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from resilient.format.keys import parse_checkpoint

pytestmark = [
    pytest.mark.xdist_group("adapters"),
    pytest.mark.filterwarnings("ignore"),  # the peers' own
]
# As written for Transformers alone, except that the test's argument ends the first process.
SCRIPT = """
import hashlib

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments


class Rows(Dataset):
    def __init__(self):
        self.x = torch.rand(24, 3, generator=torch.Generator().manual_seed(5))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.x[index].sum()}


class Guess(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def forward(self, x, labels):
        guessed = self.layers(x)
        return {"loss": (guessed.sum(1) - labels).square().mean(), "logits": guessed}


class Killed(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if "killed" in sys.argv and life == 1 and state.global_step == 7:
            os.kill(os.getpid(), signal.SIGKILL)


torch.set_num_threads(1)
torch.manual_seed(1)
args = TrainingArguments(
    output_dir="output", num_train_epochs=3, per_device_train_batch_size=4, save_steps=3,
    logging_steps=2, report_to="none", disable_tqdm=True, use_cpu=True, label_names=["labels"],
)
trainer = Trainer(Guess(), args, train_dataset=Rows(), callbacks=[Killed()])
trainer.train()
bits = b"".join(one.numpy().tobytes() for one in trainer.model.state_dict().values())
losses = [(one["step"], one["loss"]) for one in trainer.state.log_history if "loss" in one]
say("end", f"{trainer.state.global_step} {hashlib.sha256(bits).hexdigest()} {losses}")
"""


@pytest.mark.long
def test_a_killed_stock_script_ends_as_one_that_was_not(train):
    whole = train(SCRIPT, environ={"RESILIENT_ADAPTER": "transformers"})
    killed = train(SCRIPT, "--adapter", "transformers", "--repo", "mine", arguments=["killed"])
    assert (whole.end(), killed.end()) == (0, 0), whole.err + killed.err
    (expected,), (found,) = whole.said("end"), killed.said("end")
    assert found == expected
    assert found.startswith("18 ")
    assert len(killed.said("pid")) == 2
    assert "resumed from checkpoint-6-g1" in killed.err + killed.out
    for agent, repository in ((whole, "output/checkpoints"), (killed, "mine")):
        said = agent.err + agent.out
        line = f"adapter transformers: the trainer saves to `{repository}` and resumes from there"
        assert said.count(line) == len(agent.said("pid"))
        folders = [path.name for path in (agent.folder / repository).glob("checkpoint-*")]
        assert {parse_checkpoint(name).step for name in folders} >= {3, 6, 18}
        assert not list((agent.folder / "output").glob("checkpoint-*"))


@pytest.mark.long
def test_without_the_option_a_stock_script_is_left_alone(train):
    agent = train("import transformers.trainer\nsay('init', transformers.Trainer.__init__)\n")
    assert agent.end() == 0, agent.err
    assert "add_to_every_trainer" not in agent.said("init")[0]
    asked = train(
        "import transformers\nsay('init', transformers.Trainer.__init__.__code__.co_name)\n",
        *("--adapter", "transformers"),
    )
    assert asked.end() == 0, asked.err
    assert asked.said("init") == ["init"]


class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"x": torch.ones(3), "labels": torch.ones(())}


class Guess(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x, labels):
        return {"loss": (self.layer(x).sum(1) - labels).square().mean()}


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Make trainers of a class that adds the callback by itself."""
    import transformers

    from resilient.integrations.transformers import add_to_every_trainer

    monkeypatch.delenv("RESILIENT_REPO", raising=False)

    class Base(transformers.Trainer):
        pass

    class Mine(Base):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            self.is_complete = True

        def train(self, *given, **named):
            self.trained = [*getattr(self, "trained", ()), given]
            return super().train(*given, **named)

    add_to_every_trainer(Base)

    def trainer():
        args = transformers.TrainingArguments(
            str(tmp_path / "output"),
            max_steps=2,
            save_steps=1,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        return Mine(Guess(), args, train_dataset=Rows())

    return trainer


def repositories(folder):
    return sorted({path.parent.name for path in folder.rglob("checkpoint-*")})


def test_each_trainer_of_a_process_has_its_own_repository(tmp_path, make):
    for _ in range(2):
        trainer = make()
        trainer.train()
        assert trainer.is_complete
        assert len(trainer.trained) == 1
    assert repositories(tmp_path) == ["checkpoints", "checkpoints-trainer-2"]


def test_a_callback_of_the_script_takes_the_place(tmp_path, make):
    from resilient.integrations.transformers import ResilientCallback

    trainer = make()
    trainer.add_callback(ResilientCallback(trainer, tmp_path / "own"))
    trainer.train()
    assert repositories(tmp_path) == ["own"]
    callbacks = trainer.callback_handler.callbacks
    assert sum(isinstance(one, ResilientCallback) for one in callbacks) == 1
    assert len(trainer.trained) == 1
