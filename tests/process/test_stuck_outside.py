"""Ranks that are stuck before training or after it: found with all stacks, killed, and resumed."""

import json

import pytest

PATIENCE = ("--nproc-per-node", "2", "--hang-patience", "2", "--max-restarts", "2")

# What the trainer shows, without the seconds that torch takes to be imported.
SHOWN = """
from resilient.distributed.heartbeat import Phase, progress_reporter

def train():
    pulse = progress_reporter()
    pulse.enter(Phase.FIRST)
    for step in range(3):
        pulse.begin_step()
        pulse.end_step(step + 1)
    pulse.enter(Phase.OUTSIDE)

def stuck_here():
    while True:
        time.sleep(0.1)
"""

TRAINED = """
import resilient, torch

def stuck_here():
    while True:
        time.sleep(0.1)

if where == "before" and rank == 1 and life == 1:
    stuck_here()

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, place):
        return {"x": torch.ones(4) * place}

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}

args = resilient.TrainingArguments(
    output_dir="out", max_steps=4, per_device_train_batch_size=2, use_cpu=True, save_steps=2
)
resilient.Trainer(Model(), args, train_dataset=Numbers()).train()
say("trained", life)
if where == "after" and rank == 1 and life == 1:
    stuck_here()
"""


def told(agent, name):
    lines = (agent.folder / "events" / "agent.jsonl").read_text(encoding="utf-8").splitlines()
    return [one for one in map(json.loads, lines) if one["event"] == name]


def the_hang(agent):
    (hang,) = told(agent, "HangFound")
    assert set(hang["stacks"]) == {"0", "1"}
    assert "stuck_here" in hang["stacks"]["1"]["stacks"], agent.err
    assert "in stuck_here (worker.py:" in agent.err
    (failed,) = told(agent, "WorkerFailed")
    assert (failed["rank"], failed["cause"]) == (1, "hang")
    assert hang["rank"] == 1
    return hang


@pytest.mark.smoke
def test_a_rank_that_never_begins_is_found_by_who_waits_for_it(train):
    agent = train(
        SHOWN
        + """
if rank == 1 and life == 1:
    stuck_here()
pulse = progress_reporter()
while rank == 0 and life == 1:
    time.sleep(0.1)  # as in the rendezvous of the ranks
train()
""",
        *PATIENCE,
        *("--events", "events"),
    )
    assert agent.end() == 0, agent.err
    hang = the_hang(agent)
    assert (hang["phase"], hang["step"], hang["overdue"]) == ("starting", -1, [1])
    assert 2 < hang["waited_seconds"] < 30
    assert "before any step, in phase `starting`" in agent.err
    assert "--hang-patience" in agent.err


def test_a_rank_that_never_begins_is_blamed_by_training_ranks_too(train):
    agent = train(
        SHOWN
        + """
pulse = progress_reporter()
if rank == 1 and life == 1:
    stuck_here()
pulse.enter(Phase.FIRST)
while rank == 0 and life == 1:
    time.sleep(0.1)  # as in the first collective
train()
""",
        *PATIENCE,
        *("--events", "events"),
    )
    assert agent.end() == 0, agent.err
    hang = the_hang(agent)
    assert (hang["phase"], hang["overdue"]) == ("starting", [1])


def test_a_rank_that_does_not_end_is_found_once_another_has(train):
    agent = train(
        SHOWN
        + """
train()
if rank == 1 and life == 1:
    stuck_here()
""",
        *PATIENCE,
        *("--events", "events"),
    )
    assert agent.end() == 0, agent.err
    hang = the_hang(agent)
    assert (hang["phase"], hang["step"], hang["overdue"]) == ("ending", 3, [1])


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_rank_stuck_beside_the_trainer_is_found_and_the_run_ends(train, where):
    agent = train(
        f"where = {where!r}\n{TRAINED}",
        *("--nproc-per-node", "2", "--hang-patience", "8", "--max-restarts", "2"),
        *("--repo", "repo", "--events", "events"),
    )
    assert agent.end() == 0, agent.err
    assert the_hang(agent)["phase"] == {"before": "starting", "after": "ending"}[where]
    assert agent.said("trained").count("2") == 2


def test_who_shows_no_signs_may_start_late_while_another_gets_on_and_end_late(train):
    agent = train(
        """
import resilient
for step in range(30):
    if rank == 1:
        time.sleep(6)
        break
    time.sleep(0.1)
    resilient.heartbeat(step)
""",
        *("--nproc-per-node", "2", "--hang-patience", "1"),
    )
    assert agent.end() == 0, agent.err
    assert len(agent.said("pid")) == 2


def test_ranks_that_all_start_slowly_are_waited_for(train):
    agent = train(SHOWN + "\nprogress_reporter()\ntime.sleep(3)\ntrain()\n", *PATIENCE)
    assert agent.end() == 0, agent.err
    assert len(agent.said("pid")) == 2


def test_a_rank_that_works_on_after_the_others_says_so(train):
    agent = train(
        SHOWN
        + """
train()
for _ in range(8 * rank):
    time.sleep(0.5)
    progress_reporter().again()  # as evaluations do with each batch
""",
        *PATIENCE,
    )
    assert agent.end() == 0, agent.err
    assert len(agent.said("pid")) == 2
