"""Other trainers that save and resume through us: killed, or broken off anywhere, the same bits."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resilient.distributed.heartbeat import Phase, progress_reporter
from resilient.errors import ConfigError
from resilient.format.keys import parse_checkpoint
from tests.process.gangs import ROOT
from tests.process.scripts import Script

pytestmark = [
    pytest.mark.xdist_group("adapters"),
    pytest.mark.filterwarnings("ignore"),  # the peers' own
]
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
EXAMPLES = {
    "hf_trainer.py": (60, 30, "checkpoints", TWO_RANKS),
    "with_accelerate.py": (8, 50, "", TWO_RANKS),
    "with_lightning.py": (4, 60, "", ()),
}


@pytest.mark.long
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_killed_example_ends_as_one_that_was_not(tmp_path, name):
    length, step, repository, launcher = EXAMPLES[name]

    def example(folder):
        script = ROOT / "examples" / name
        return Script(script, tmp_path / folder, length, launcher=launcher, repository=repository)

    whole = example("whole").run_to_end()
    assert len(whole) == 1
    assert example("killed").killed_and_started_again(step) == whole
    kinds = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert kinds == {".json", ".safetensors"}


class Digits(torch.utils.data.Dataset):
    """Samples in the form of Transformers."""

    def __init__(self, samples=22) -> None:
        self.x = torch.rand(samples, 3, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.x[index].sum()}


class Guess(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def forward(self, x, labels):
        guessed = self.layers(x)
        return {"loss": (guessed.sum(1) - labels).square().mean(), "logits": guessed}


def bits(model):
    return [one.detach().numpy().tobytes() for one in model.state_dict().values()]


def with_transformers(folder):
    from transformers import Trainer, TrainingArguments

    from resilient.integrations.transformers import ResilientCallback

    torch.manual_seed(1)
    args = TrainingArguments(
        output_dir=str(folder.parent / "output"),
        num_train_epochs=3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        save_steps=2,
        logging_steps=3,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        label_names=["labels"],
    )
    trainer = Trainer(Guess(), args, train_dataset=Digits(), eval_dataset=Digits(8))
    trainer.add_callback(ResilientCallback(trainer, folder))
    trainer.train()
    history = sorted(
        (one["step"], name, value)
        for one in trainer.state.log_history
        for name, value in one.items()
        if name in ("loss", "eval_loss", "grad_norm", "learning_rate")
    )
    return bits(trainer.model), history, trainer.state.best_metric


def with_accelerate(folder):
    from accelerate import Accelerator

    from resilient.integrations.accelerate import AcceleratorCheckpointer

    torch.manual_seed(1)
    accelerator, model = Accelerator(cpu=True), Guess()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = DataLoader(Digits(), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    with AcceleratorCheckpointer(accelerator, folder, losses=losses) as checkpointer:
        step = checkpointer.resume() or 0
        while checkpointer.epoch < 3:
            for batch in checkpointer.batches(loader):
                step += 1
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                checkpointer.save(step)
    return bits(model), losses


def with_lightning(folder):
    from lightning.pytorch import LightningModule, Trainer

    from resilient.integrations.lightning import ResilientCheckpoint

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.guess = Guess()

        def training_step(self, batch, _):
            return self.guess(batch[0], batch[0].sum(1))["loss"]

        def validation_step(self, batch, _):
            self.log("loss", self.guess(batch[0], batch[0].sum(1))["loss"])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    torch.manual_seed(1)
    module, data = Module(), TensorDataset(Digits().x)
    trainer = Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ResilientCheckpoint(folder, every_n_steps=2)],
    )
    trainer.fit(module, DataLoader(data, 4, shuffle=True), DataLoader(data, 11, shuffle=True))
    return bits(module), trainer.global_step


def steps_in(repository):
    found = [parse_checkpoint(one.name) for one in repository.glob("checkpoint-*")]
    return sorted(one.step for one in found)


@pytest.mark.parametrize("train", [with_transformers, with_accelerate, with_lightning])
def test_from_every_checkpoint_on_the_run_ends_the_same(tmp_path, train):
    whole = tmp_path / "whole" / "repository"
    expected = train(whole)
    steps = steps_in(whole)
    assert len(steps) >= 4
    for step in steps:
        part = tmp_path / f"from-{step}" / "repository"
        shutil.copytree(whole, part)
        for later in steps[steps.index(step) + 1 :]:
            shutil.rmtree(part / f"checkpoint-{later}-g1")
        assert train(part) == expected, f"from step {step}"
        assert steps_in(part)[: len(steps)] == steps


@pytest.mark.parametrize(
    ("train", "in_step", "steps"),
    [
        # What is no step of theirs is not known of a loop of one's own.
        (with_transformers, Phase.STEP, 9),
        pytest.param(with_accelerate, Phase.BETWEEN, 18, marks=pytest.mark.smoke),
        (with_lightning, Phase.STEP, 18),
    ],
)
def test_the_agent_sees_that_their_steps_get_on(tmp_path, monkeypatch, train, in_step, steps):
    monkeypatch.setattr("resilient.distributed.heartbeat._own_reporter", [])
    pulse, forward = progress_reporter(), Guess.forward
    seen = {True: [], False: []}

    def shown(self, x, labels):
        seen[self.training].append((pulse.phase, pulse._step))
        return forward(self, x, labels)

    monkeypatch.setattr(Guess, "forward", shown)
    train(tmp_path / "repository")
    first, *later = dict.fromkeys(seen[True])
    assert first == (Phase.FIRST, -1)
    assert later == [(in_step, step) for step in range(1, steps)]
    # Between two steps; Lightning begins with a rehearsal of it.
    assert {phase for phase, _ in seen[False]} <= {Phase.BETWEEN, Phase.FIRST}
    assert (pulse.phase, pulse._step) == (Phase.OUTSIDE, steps)


def test_a_trainer_is_not_given_the_folder_that_it_sweeps(tmp_path):
    from transformers import Trainer, TrainingArguments

    from resilient.integrations.transformers import ResilientCallback

    args = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    trainer = Trainer(Guess(), args, train_dataset=Digits())
    with pytest.raises(ConfigError, match="output_dir"):
        ResilientCallback(trainer, tmp_path)
    trainer.add_callback(ResilientCallback(trainer, tmp_path / "repository"))
    with pytest.raises(ConfigError, match="decides where to continue"):
        trainer._init_training_state(1, 1, 1, "elsewhere", None)
