"""`resilient train --resume`: the wish holds until a checkpoint of this run exists."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from resilient import Checkpointer
from resilient.errors import NothingToResume
from tests.helpers.hf_runs import checkpoint_of

WORKER = Path(__file__).with_name("transformers_worker.py")
# Life 1 dies before its first save, life 2 after it.
DYING = """
from resilient import Checkpointer
saver = Checkpointer("../repo", count=0)
start = saver.resume()
say("begin", start)
if life == 1:
    os.kill(os.getpid(), signal.SIGKILL)
saver.save((start or 0) + 1)
saver.wait()
if life == 2:
    os.kill(os.getpid(), signal.SIGKILL)
saver.close()
"""
ONCE = """
from resilient import Checkpointer
with Checkpointer("../repo", count=0) as saver:
    start = saver.resume()
    say("begin", start)
    saver.save((start or 0) + 1)
"""
REFUSAL = """
from resilient.errors import {name}
while not os.path.exists("pid.0") or not os.path.exists("pid.1"):
    time.sleep(0.01)
if rank == {rank}:
    raise {name}("the checkpoint is not to be taken")
time.sleep(60)
"""


def begun(agent, code=0):
    assert agent.end() == code, agent.err
    return agent.said("begin")


@pytest.fixture
def old_run(tmp_path):
    """Let an older run save some steps to the repository."""

    def save(steps):
        with Checkpointer(str(tmp_path / "repo"), count=0) as saver:
            saver.resume()
            for step in range(1, steps + 1):
                saver.save(step)

    return save


@pytest.mark.parametrize("by_script", [False, True])
def test_resume_never_holds_until_this_run_has_saved(train, old_run, by_script):
    old_run(2)
    if by_script:
        agent = train(DYING.replace("resume()", 'resume("never")'))
    else:
        agent = train(DYING, "--resume", "never")
    assert begun(agent) == ["None", "None", "1"]
    assert "generation 3 of this run has saved a checkpoint" in agent.err


def test_resume_reference_holds_until_this_run_has_saved(train, old_run):
    old_run(3)
    agent = train(DYING, "--resume", "latest~1")
    assert begun(agent) == ["2", "2", "3"]
    assert "this run started there, so this attempt continues from checkpoint-2-g1" in agent.err


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("wish", "options", "workers"),
    [
        ("checkpoint-500", (), 1),
        ("elsewhere/checkpoint-500", (), 1),  # only the script knows the repository
        ("elsewhere/checkpoint-500", ("--repo", "empty"), 0),
    ],
)
def test_resume_reference_missing_ends_at_once_with_66(train, wish, options, workers):
    agent = train(DYING, "--resume", wish, *options)
    assert agent.end() == 66, agent.err
    assert len(agent.said("pid")) == workers, agent.err


def test_refusal_of_a_loop_under_plain_python_ends_with_1(tmp_path, old_run):
    old_run(1)
    loop = tmp_path / "loop.py"
    loop.write_text(
        "from resilient import Checkpointer\n"
        f"Checkpointer({str(tmp_path / 'repo')!r}, count=0).resume('checkpoint-9')\n"
    )
    ended = subprocess.run([sys.executable, loop], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "NothingToResume" in ended.stderr
    assert NothingToResume.exit_code == 66


# Life 1 dies before its first save.
TRAINING = """
import torch
from resilient import Trainer, TrainingArguments
from resilient.train.callbacks.base import TrainerCallback

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}

class Killed(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        say("begin", state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        if life == 1:
            os.kill(os.getpid(), signal.SIGKILL)

arguments = TrainingArguments(
    "run", repo="../repo", max_steps=2, save_steps=2, report_to="none", use_cpu=True,
    disable_tqdm=True, per_device_train_batch_size=1,
)
data = [{"x": torch.ones(2)} for _ in range(8)]
Trainer(Model(), arguments, train_dataset=data, callbacks=[Killed()]).train(False)
"""


def test_resume_false_of_the_script_holds_until_this_run_has_saved(train, old_run):
    old_run(2)
    agent = train(TRAINING)
    assert agent.process.wait(180) == 0, agent.err
    assert agent.said("begin") == ["0", "0"], agent.err


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "code", "rank"), [("IntegrityError", 1, 1), ("IncompatibleCheckpoint", 65, 0)]
)
def test_refusal_of_one_rank_ends_the_run_at_once(train, name, code, rank):
    agent = train(REFUSAL.format(name=name, rank=rank), "--nproc-per-node", "2")
    assert agent.end() == code, agent.err
    assert len(agent.said("pid")) == 2
    assert f"rank {rank} failed first" in agent.err


def test_resume_never_of_a_requeued_job_continues(train, old_run):
    old_run(1)
    job = {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "here"}
    options = ("--resume", "never", "--notice", "off")
    assert begun(train(ONCE, *options, environ=job)) == ["None"]
    requeued = train(ONCE, *options, environ={**job, "SLURM_RESTART_COUNT": "1"})
    assert begun(requeued) == ["1"]
    assert "--resume never` is fulfilled" in requeued.err
    by_hand = train(ONCE, *options, environ=job)
    assert begun(by_hand) == ["None"], "a second start in one allocation is new"


# Life 1 dies while it writes the imported checkpoint.
TAKING = """
import runpy
from resilient import checkpoint_engine
if life == 1:
    checkpoint_engine.CheckpointEngine.save = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
sys.argv = [{worker!r}, ".", "reg_sgd:0"]
runpy.run_path({worker!r}, run_name="__main__")
"""


def test_resume_folder_killed_while_imported_imports_it_again(train):
    folder = checkpoint_of("reg_sgd", 7)
    agent = train(TAKING.format(worker=str(WORKER)), "--resume", str(folder))
    assert agent.end() == 0, agent.err
    assert len(agent.said("pid")) == 2
    assert "imported step 7" in agent.err
    assert "resumed from checkpoint-7-g2" in agent.err
