"""State that ``Accelerator.save_state`` keeps: the adapter keeps it, refuses it or names it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resilient.errors import ConfigError, IncompatibleCheckpoint, StartOverRefused
from resilient.integrations.accelerate import AcceleratorCheckpointer

pytestmark = [
    pytest.mark.xdist_group("adapters"),
    pytest.mark.filterwarnings("ignore"),  # the peers' own
]
ROWS = torch.arange(16.0).reshape(8, 2) / 8


@pytest.fixture(autouse=True)
def one_accelerator():
    """Let each test make an Accelerator of its own."""
    yield
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)


def accelerated(**options):
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True, **options)


class Run:
    """A model, its optimizer and a loader, prepared by a new Accelerator."""

    def __init__(self, seed=0, empty_group=False, schedule=None, stateful=False, **options):
        torch.manual_seed(seed)
        self.accelerator = accelerated(**options)
        model, loader = nn.Linear(2, 1), DataLoader(TensorDataset(ROWS), 2, shuffle=True)
        groups = [{"params": model.parameters()}, *([{"params": []}] if empty_group else [])]
        optimizer = torch.optim.AdamW(groups, lr=0.1)
        things = [model, optimizer, loader, *([schedule(optimizer)] if schedule else [])]
        prepared = self.accelerator.prepare(*things)
        self.model, self.optimizer, self.loader = prepared[:3]
        self.schedule = prepared[3] if schedule else None
        self.loader.use_stateful_dataloader = stateful

    def train(self, checkpointer, epochs=1, stop_after=99):
        """Train and save each step; return the first number of each batch."""
        seen = []
        while checkpointer.epoch < epochs:
            for (rows,) in checkpointer.batches(self.loader):
                self.accelerator.backward(self.model(rows).square().mean())
                self.optimizer.step()
                self.optimizer.zero_grad()
                if self.schedule is not None:
                    self.schedule.step()
                seen.append(rows[0, 0].item())
                checkpointer.save(checkpointer.epoch * 100 + checkpointer._state_number)
                if len(seen) == stop_after:
                    return seen
        return seen


class Recorder:
    """Hooks as scripts write them: one file each, and the weights are taken over."""

    def __init__(self, run):
        self.run, self.saves, self.loaded, self.held = run, 0, None, None

    def save(self, models, weights, folder):
        self.saves += 1
        assert [list(one) for one in weights] == [["weight", "bias"]]
        (Path(folder) / "unet").mkdir()
        (Path(folder) / "unet" / "config.json").write_text(json.dumps({"saves": self.saves}))
        (Path(folder) / "empty").touch()
        torch.save(models[0].state_dict(), Path(folder) / "unet" / "weights.pt")
        weights.pop()

    def load(self, models, folder):
        self.loaded = json.loads((Path(folder) / "unet" / "config.json").read_text())
        assert (Path(folder) / "empty").read_bytes() == b""
        self.held = torch.load(Path(folder) / "unet" / "weights.pt")
        models.pop().load_state_dict({name: one * 0 for name, one in self.held.items()})


def hooked():
    run = Run()
    hooks = Recorder(run)
    run.accelerator.register_save_state_pre_hook(hooks.save)
    run.accelerator.register_load_state_pre_hook(hooks.load)
    return run, hooks


@pytest.mark.smoke
def test_hooks_are_called_and_their_files_are_kept(tmp_path):
    run, hooks = hooked()
    with AcceleratorCheckpointer(run.accelerator, tmp_path) as checkpointer:
        assert checkpointer.resume() is None
        run.train(checkpointer)
    assert (hooks.saves, hooks.loaded) == (4, None)
    again, later = hooked()
    with AcceleratorCheckpointer(again.accelerator, tmp_path) as checkpointer:
        assert checkpointer.resume() == 4
    assert (later.saves, later.loaded) == (0, {"saves": 4})
    for name, one in run.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], one)
        assert torch.equal(later.held[name], one)


def test_checkpoint_with_hook_files_refuses_a_run_without_hooks(tmp_path):
    run, _ = hooked()
    with AcceleratorCheckpointer(run.accelerator, tmp_path) as checkpointer:
        checkpointer.resume()
        run.train(checkpointer, stop_after=1)
    with (
        AcceleratorCheckpointer(Run().accelerator, tmp_path) as checkpointer,
        pytest.raises(IncompatibleCheckpoint, match="hooks"),
    ):
        checkpointer.resume()


def test_checkpoint_without_hook_files_is_taken_by_a_run_with_hooks(tmp_path):
    run = Run()
    with AcceleratorCheckpointer(run.accelerator, tmp_path) as checkpointer:
        checkpointer.resume()
        run.train(checkpointer, stop_after=1)
    again, hooks = hooked()
    with AcceleratorCheckpointer(again.accelerator, tmp_path) as checkpointer:
        assert checkpointer.resume() == 1
    assert hooks.loaded is None


def late_model(run):
    run.accelerator.prepare(nn.Linear(1, 1))


def late_object(run):
    run.accelerator.register_for_checkpointing(nn.Linear(1, 1))


def late_hook(run):
    run.accelerator.register_save_state_pre_hook(lambda *_: None)


@pytest.mark.parametrize("add", [late_model, late_object, late_hook], ids=lambda one: one.__name__)
def test_object_prepared_after_the_checkpointer_is_refused(tmp_path, add):
    run = Run()
    with AcceleratorCheckpointer(run.accelerator, tmp_path) as checkpointer:
        checkpointer.resume()
        run.train(checkpointer, stop_after=1)
        add(run)
        with pytest.raises(ConfigError, match="would miss") as caught:
            checkpointer.save(7)
    assert "after prepare()" in caught.value.hint
    assert [one.name for one in tmp_path.glob("checkpoint-*")] == ["checkpoint-1-g1"]
    second = Run()
    late = AcceleratorCheckpointer(second.accelerator, tmp_path)
    add(second)
    with pytest.raises(ConfigError, match="would miss"):
        late.resume()


def test_stateful_loader_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="StatefulDataLoader") as caught:
        AcceleratorCheckpointer(Run(stateful=True).accelerator, tmp_path)
    assert "use_stateful_dataloader=False" in caught.value.hint


def test_limit_and_iteration_of_the_project_are_kept(tmp_path):
    def project():
        return ProjectConfiguration(
            str(tmp_path / "project"), automatic_checkpoint_naming=True, total_limit=2
        )

    run = Run(project_config=project())
    with AcceleratorCheckpointer(run.accelerator, tmp_path / "repository") as checkpointer:
        checkpointer.resume()
        run.accelerator.save_state()
        run.train(checkpointer)
    assert len(list((tmp_path / "repository").glob("checkpoint-*"))) == 2
    again = Run(project_config=project())
    with AcceleratorCheckpointer(again.accelerator, tmp_path / "repository") as checkpointer:
        assert checkpointer.resume() == 4
        again.accelerator.save_state()
    names = sorted(one.name for one in (tmp_path / "project" / "checkpoints").iterdir())
    assert names == ["checkpoint_0", "checkpoint_1"]


def test_option_of_the_script_counts_before_the_project_limit(tmp_path):
    project = ProjectConfiguration(
        str(tmp_path / "project"), automatic_checkpoint_naming=True, total_limit=1
    )
    run = Run(project_config=project)
    url = tmp_path / "repository"
    with AcceleratorCheckpointer(run.accelerator, url, keep_last=3) as checkpointer:
        checkpointer.resume()
        run.train(checkpointer)
    assert len(list(url.glob("checkpoint-*"))) == 3


@pytest.mark.smoke
def test_checkpoints_of_accelerate_refuse_a_start_at_step_0(tmp_path):
    project = ProjectConfiguration(str(tmp_path / "project"), automatic_checkpoint_naming=True)
    Run(project_config=project).accelerator.save_state()
    run = Run(project_config=ProjectConfiguration(project.project_dir, None, True, iteration=1))
    with (
        AcceleratorCheckpointer(run.accelerator, tmp_path / "repository") as checkpointer,
        pytest.raises(StartOverRefused, match="checkpoint_0"),
    ):
        checkpointer.resume()


def test_seed_of_a_seedable_sampler_is_kept(tmp_path):
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    whole = Run(seed=1, dataloader_config=config)
    with AcceleratorCheckpointer(whole.accelerator, tmp_path / "whole") as checkpointer:
        checkpointer.resume()
        expected = whole.train(checkpointer, epochs=2)
    first = Run(seed=1, dataloader_config=config)
    with AcceleratorCheckpointer(first.accelerator, tmp_path / "parts") as checkpointer:
        checkpointer.resume()
        seen = first.train(checkpointer, stop_after=3)
    second = Run(seed=2, dataloader_config=config)
    with AcceleratorCheckpointer(second.accelerator, tmp_path / "parts") as checkpointer:
        checkpointer.resume()
        seen += second.train(checkpointer, epochs=2)
    assert seen == expected
    assert torch.equal(whole.model.weight, second.model.weight)


def evaluated(run, generator):
    loader = DataLoader(TensorDataset(ROWS), 8, shuffle=True, generator=generator)
    return run.accelerator.prepare_data_loader(loader)


def test_generator_of_an_evaluation_loader_is_kept(tmp_path):
    def drawn(loader):
        return next(iter(loader))[0][:, 0].tolist()

    run = Run()
    loader = evaluated(run, torch.Generator().manual_seed(3))
    with AcceleratorCheckpointer(run.accelerator, tmp_path) as checkpointer:
        checkpointer.resume()
        drawn(loader)
        run.train(checkpointer)
        expected = drawn(loader)
    again = Run()
    loader = evaluated(again, torch.Generator().manual_seed(3))
    with AcceleratorCheckpointer(again.accelerator, tmp_path) as checkpointer:
        checkpointer.resume()
        assert drawn(loader) == expected


def test_generators_that_are_gone_are_named(tmp_path, capsys):
    run = Run()
    evaluated(run, torch.Generator())
    with AcceleratorCheckpointer(run.accelerator, tmp_path) as checkpointer:
        checkpointer.resume()
        run.train(checkpointer)
    with AcceleratorCheckpointer(Run().accelerator, tmp_path) as checkpointer:
        checkpointer.resume()
    assert "not kept in checkpoints: generators of data loaders" in capsys.readouterr().err


def test_scaler_registered_object_and_schedule_are_kept(tmp_path):
    def scheduled(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def made():
        run = Run(schedule=scheduled)
        run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        run.extra = nn.Linear(1, 1)
        run.accelerator.register_for_checkpointing(run.extra)
        return run

    run = made()
    with AcceleratorCheckpointer(run.accelerator, tmp_path) as checkpointer:
        checkpointer.resume()
        run.train(checkpointer, stop_after=2)
        run.accelerator.scaler.update(4.0)
        checkpointer.save(3)
    again = made()
    with torch.no_grad():
        again.extra.weight.zero_()
    with AcceleratorCheckpointer(again.accelerator, tmp_path) as checkpointer:
        assert checkpointer.resume() == 3
    assert again.accelerator.scaler.get_scale() == 4.0
    assert torch.equal(again.extra.weight, run.extra.weight)
    assert again.schedule.state_dict() == run.schedule.state_dict()
    assert again.optimizer.param_groups[0]["lr"] == 0.05


def test_registered_object_that_is_gone_is_refused(tmp_path):
    run = Run()
    run.accelerator.register_for_checkpointing(nn.Linear(1, 1))
    with AcceleratorCheckpointer(run.accelerator, tmp_path) as checkpointer:
        checkpointer.resume()
        run.train(checkpointer, stop_after=1)
    with (
        AcceleratorCheckpointer(Run().accelerator, tmp_path) as checkpointer,
        pytest.raises(IncompatibleCheckpoint, match="registered"),
    ):
        checkpointer.resume()


def test_schedule_with_other_groups_is_refused(tmp_path):
    def scheduled(optimizer):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        schedule.base_lrs = schedule.base_lrs * groups
        return schedule

    groups = 1
    run = Run(schedule=scheduled)
    with AcceleratorCheckpointer(run.accelerator, tmp_path) as checkpointer:
        checkpointer.resume()
        run.train(checkpointer, stop_after=1)
    groups = 2
    with (
        AcceleratorCheckpointer(Run(schedule=scheduled).accelerator, tmp_path) as checkpointer,
        pytest.raises(IncompatibleCheckpoint, match="scheduler"),
    ):
        checkpointer.resume()


@pytest.mark.smoke
def test_empty_parameter_group_is_resumed(tmp_path):
    for step in (None, 1):
        run = Run(empty_group=True)
        with AcceleratorCheckpointer(run.accelerator, tmp_path) as checkpointer:
            assert checkpointer.resume() == step
            run.train(checkpointer, stop_after=1)


def test_files_that_hooks_of_one_rank_wrote_are_read_on_every_rank(tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    worker = Path(__file__).with_name("accelerate_hooks_worker.py")
    ended = subprocess.run(
        [*launch, str(worker), str(tmp_path)],
        check=False, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
