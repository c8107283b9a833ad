"""`resilient train` on random contents of store and folder: it continues, or it refuses.

``make launches N=100 SEED=1`` runs more; ``--launches-seed`` repeats one: launch ``k`` of a run
draws from the seed ``SEED + k``.
"""

from __future__ import annotations

import random
import re
import shlex
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from resilient import Checkpointer
from resilient.errors import EXIT_CODES
from tests.helpers.hf_runs import checkpoint_of

if TYPE_CHECKING:
    from pathlib import Path

DOCUMENTED = {code.number for code in EXIT_CODES}
STEPS_MAX = 3
DAMAGES = ("flip", "cut", "no manifest", "no weights")
ENGINE = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")
FOREIGN = {
    "transformers": (),
    "lightning deepspeed": (
        *("epoch=0-step=8.ckpt/latest", *(f"epoch=0-step=8.ckpt/checkpoint/{n}" for n in ENGINE)),
    ),
    "logger": ("exp/version_0/checkpoints/epoch=0-step=8.ckpt",),
    "megatron": ("iter_0000010/mp_rank_00/model_optim_rng.pt", "latest_checkpointed_iteration.txt"),
    "subfolder": ("ckpts/checkpoint_3.pt",),
    "single file": ("resume.pth.tar",),
}
"""Files of checkpoints of other tools; those of Transformers are real."""
REFUSED = re.compile(r"rank 0 failed first in attempt \d+: \w+: (.*)")
COMMAND = re.compile(r"resilient train [^;,]*?SCRIPT")
SCRIPT = """
from resilient import Checkpointer
saver = Checkpointer("../repo", count=0)
start = saver.resume()
say("begin", start)
if life == 1 and {dies}:
    os.kill(os.getpid(), signal.SIGKILL)
saver.save((start or 0) + 1)
saver.close()
"""


@dataclass
class Situation:
    """Contents of a repository, and how a run starts there.

    Attributes:
        wish: Value of ``--resume``.
        dies: Whether the first life is killed before its first save.
        intact: Steps of undamaged checkpoints.
        uncommitted: Steps that lost their manifest: no checkpoint any more.
        damaged: Steps of the other damaged checkpoints.
        has_foreign: Whether a checkpoint of another tool lies in the repository.
    """

    wish: str
    dies: bool
    intact: set[int] = field(default_factory=set)
    uncommitted: set[int] = field(default_factory=set)
    damaged: set[int] = field(default_factory=set)
    has_foreign: bool = False

    @property
    def is_empty(self) -> bool:
        return not self.intact and not self.damaged and not self.has_foreign

    @property
    def newest(self) -> int | None:
        return max(self.intact, default=None)

    def allows(self, begun: int | None) -> bool:
        """Say whether the first life may begin from a step; None is a start from scratch."""
        if self.wish == "never":
            return begun is None
        if begun is None:
            # A step whose manifest is lost was never committed, as far as the store can tell.
            return self.wish == "auto" and self.is_empty
        if self.wish in ("auto", "latest"):
            return begun == self.newest
        # A path and an unknown name refer to no checkpoint of the repository.
        return self.wish in ("latest~1", "step:2") and begun in self.intact


def damage(folder: Path, kind: str, draw: random.Random) -> None:
    files = sorted(one for one in folder.rglob("*") if one.is_file())
    if kind == "no manifest":
        (folder / "manifest.json").unlink()
    elif kind == "no weights":
        draw.choice([one for one in files if one.name != "manifest.json"]).unlink()
    else:
        victim = draw.choice(files)
        data = bytearray(victim.read_bytes())
        if kind == "flip":
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        else:
            del data[draw.randrange(len(data)) :]
        victim.write_bytes(data)


def arrange(repo: Path, draw: random.Random) -> Situation:
    """Fill a repository at random."""
    wishes = (
        *("auto", "auto", "auto", "never", "latest", "latest~1", "step:2"),
        *("theirs/checkpoint-9", "../repo", "nowhere"),
    )
    found = Situation(draw.choice(wishes), draw.random() < 0.3)
    steps = draw.randint(0, STEPS_MAX)
    if steps:
        with Checkpointer(str(repo), count=0) as saver:
            saver.resume()
            for step in range(1, steps + 1):
                saver.save(step)
    for step in range(1, steps + 1):
        found.intact.add(step)
        if draw.random() < 0.4:
            kind = draw.choice(DAMAGES)
            damage(repo / f"checkpoint-{step}-g1", kind, draw)
            found.intact.remove(step)
            (found.uncommitted if kind == "no manifest" else found.damaged).add(step)
    if draw.random() < 0.4:
        place_foreign(repo, draw.choice(sorted(FOREIGN)))
        found.has_foreign = True
    return found


def place_foreign(repo: Path, kind: str) -> None:
    """Put a checkpoint of another tool into the folder of a repository."""
    repo.mkdir(exist_ok=True)
    if kind == "transformers":
        shutil.copytree(checkpoint_of("reg_sgd", 7), repo / "checkpoint-7")
    for name in FOREIGN[kind]:
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_text("x")


def test_launches_random_situations_continue_or_refuse(train, tmp_path, request):
    count = request.config.getoption("--launches")
    first = request.config.getoption("--launches-seed")
    outcomes = {}
    for seed in range(first, first + count):
        print(f"repeat with --launches 1 --launches-seed {seed}")  # noqa: T201 - for a failure
        repo = tmp_path / "repo"
        shutil.rmtree(repo, ignore_errors=True)
        given = arrange(repo, random.Random(seed))
        agent = train(SCRIPT.format(dies=given.dies), "--resume", given.wish)
        code = agent.end()
        begun = [None if one == "None" else int(one) for one in agent.said("begin")]
        assert code in DOCUMENTED, (given, agent.err)
        assert all(given.allows(one) for one in begun), (given, begun, agent.err)
        assert code != 0 or begun, (given, agent.err)
        if code and given.wish in ("auto", "never") and not given.is_empty:
            assert given.newest is None, (given, code, agent.err)
        for text in REFUSED.findall(agent.err) if not begun else ():
            assert agent.err.count(text) == 1, (given, agent.err)
        outcomes[code] = outcomes.get(code, 0) + 1
    print(f"exit codes of {count} launches: {outcomes}")  # noqa: T201 - the result of `make launches`


def commands_of(agent):
    """Return the commands of a refusal's hint, with the script of this test."""
    return [
        shlex.split(one.replace("SCRIPT", "worker.py"))[2:-1] for one in COMMAND.findall(agent.err)
    ]


def arrange_below(repo: Path) -> None:
    """Fill a repository in a folder below the one that the script names."""
    with Checkpointer(str(repo / "checkpoints"), count=0) as saver:
        saver.resume()
        saver.save(1)


@pytest.mark.parametrize(
    ("kind", "wish", "continues"),
    [
        ("below", "auto", [1]),
        ("below", "../repo", [1]),
        ("transformers", "auto", []),
        ("transformers", "../repo/checkpoint-7", []),
        ("nothing", "nowhere", []),
    ],
)
def test_launch_refused_each_hinted_command_works(train, tmp_path, kind, wish, continues):
    script, repo = SCRIPT.format(dies=False), tmp_path / "repo"

    def refill():
        shutil.rmtree(repo, ignore_errors=True)
        if kind == "below":
            arrange_below(repo)
        elif kind != "nothing":
            place_foreign(repo, kind)

    refill()
    agent = train(script, "--resume", wish)
    assert agent.end() != 0
    assert not agent.said("begin")
    commands = commands_of(agent)
    assert commands, agent.err
    begun = []
    for options in commands:
        refill()
        again = train(script, *options)
        assert again.end() == 0, (options, again.err)
        begun += again.said("begin")
    assert [int(one) for one in begun if one != "None"] == continues
    assert begun.count("None") == 1, "one command starts at step 0"


def test_oracle_of_launches_refuses_a_silent_start_over():
    given = Situation("auto", dies=False, intact={1, 2})
    assert given.allows(2)
    assert not given.allows(1)
    assert not given.allows(None)
    assert Situation("auto", dies=False).allows(None)


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_of_launches_changes_the_checkpoint(tmp_path, kind):
    repo = tmp_path / "repo"
    with Checkpointer(str(repo), count=0) as saver:
        saver.resume()
        saver.save(1)
    folder = repo / "checkpoint-1-g1"
    before = {one: one.read_bytes() for one in folder.rglob("*") if one.is_file()}
    damage(folder, kind, random.Random(1))
    assert before != {one: one.read_bytes() for one in folder.rglob("*") if one.is_file()}
