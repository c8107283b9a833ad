"""Resume policy: 10,000 histories of a repository, each begun, killed, saved and damaged at random.

The start guard sees each checkpoint among 10,000 random contents of a folder.

``--fuzz-seed`` repeats the histories of another run.
"""

from __future__ import annotations

import random

import pytest

from resilient.checkpoint.catalog import lineage
from resilient.checkpoint.generations import claim, mark_committed
from resilient.checkpoint.refs import resolve
from resilient.checkpoint.resume_policy import (
    GenerationFacts,
    ResumeFacts,
    decide_resume,
    resolve_resume_option,
)
from resilient.clock import SystemClock
from resilient.distributed.start_identity import StartIdentity
from resilient.elastic.restart_policy import PERMANENT_CODES
from resilient.errors import NoIntactCheckpoint, NothingToResume, RepositoryNotFound, UsageError
from resilient.format.keys import CheckpointId, generation_key
from resilient.start_guard import _find_checkpoints
from resilient.storage.folder import DirectoryListing
from resilient.testing.memory_store import MemoryStore

SITUATIONS = 10_000
HISTORIES = 1_000
WISHES = ("auto", "never", "latest", "latest~1", "step:2", "theirs/checkpoint-500")


@pytest.fixture
def draw(request):
    seed = request.config.getoption("--fuzz-seed")
    print(f"repeat with --fuzz-seed {seed}")  # noqa: T201 - pytest shows it if the test fails
    return random.Random(seed)


def situation(draw):
    """Return random facts; records that are damaged hide their owner and their parent."""
    generations = []
    for number in range(1, draw.randint(0, 6) + 1):
        is_of_this_run = draw.choice((False, False, True, None))
        parent = None
        if is_of_this_run is not None and number > 1 and draw.random() < 0.5:
            parent = CheckpointId(draw.randint(1, number - 1), draw.randint(1, 9))
        has_checkpoint = draw.random() < 0.5
        has_mark = draw.random() < (0.9 if has_checkpoint else 0.2)
        generations.append(
            GenerationFacts(number, is_of_this_run, parent, has_checkpoint, has_mark)
        )
    return ResumeFacts(draw.choice(WISHES), draw.random() < 0.5, tuple(generations))


def test_decide_resume_random_facts_obey_the_wish_or_refuse(draw):
    for _ in range(SITUATIONS):
        facts = situation(draw)
        found = decide_resume(facts).reference
        ours = [one for one in facts.generations if one.is_of_this_run]
        has_saved = any(one.has_checkpoint for one in ours)
        is_doubtful = any(one.has_mark for one in ours) or any(
            one.is_of_this_run is None for one in facts.generations
        )
        if facts.resume_option == "auto" or has_saved:
            assert found == "auto", facts
        elif found == "":
            assert is_doubtful, facts
        elif facts.resume_option == "never":
            assert found == "never", facts
        else:
            begun = [one.parent.folder for one in ours if one.parent]
            assert found == (begun[-1] if begun else facts.resume_option), facts


class History:
    """A repository, and what its one run of interest has done there."""

    def __init__(self, draw):
        self.draw, self.store = draw, MemoryStore()
        self.saved, self.damaged, self.began = set(), set(), ""
        for _ in range(draw.randint(0, 2)):
            self.live(StartIdentity(f"other-{draw.random()}", training=1), None)

    def live(self, start, parent):
        """Claim a generation, and save some steps; return what was saved."""
        life = claim(self.store, parent, cause="start", clock=SystemClock(), start=start)
        steps = range(1, self.draw.choice((0, 0, 1, 2, 3)) + 1)
        made = [CheckpointId(life.number, (parent.step if parent else 0) + one) for one in steps]
        for one in made:
            self.store.put(one.manifest_key, b"{}")
        if made:
            mark_committed(self.store, life.number)
        if self.draw.random() < 0.1:
            self.store.put(generation_key(life.number), b"damage")
            self.damaged.add(life.number)
        return made

    def attempt(self, wish, start, *, is_first):
        """Make one attempt; return the checkpoint that it continues from, None for scratch."""
        reference = resolve_resume_option(self.store, wish, [start], is_first=is_first).reference
        if reference == "never":
            parent = None
        elif reference == "auto":
            known = lineage(self.store)
            if known.lost:
                raise NoIntactCheckpoint(known.lost)
            parent = known.candidates[0] if known.candidates else None
        else:
            parent = resolve(self.store, reference)
        self.saved |= set(self.live(start, parent))
        return reference, parent


def test_settle_wish_random_histories_never_start_over_silently(draw):
    refusals = (NoIntactCheckpoint, NothingToResume, RepositoryNotFound, UsageError)
    assert {one.exit_code for one in refusals} <= PERMANENT_CODES
    for _ in range(HISTORIES):
        history, wish = History(draw), draw.choice(WISHES)
        start = StartIdentity("mine", training=1)
        began = None
        for number in range(draw.randint(1, 5)):
            before, is_empty = set(history.saved), not lineage(history.store).candidates
            try:
                reference, parent = history.attempt(wish, start, is_first=number == 0)
            except refusals:
                break
            if parent is None:
                assert is_empty or (wish == "never" and not before), (wish, reference)
            elif before:
                assert parent in before or history.damaged, (wish, reference, parent)
            elif wish not in ("auto", "never"):
                assert began in (None, parent) or history.damaged, "a reference moved"
                began = parent


ENGINE = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")
CHECKPOINTS = {
    "checkpoint-{n}": ("trainer_state.json", "model.safetensors", "optimizer.pt"),
    "checkpoint-{n}-g1": ("manifest.json", "model/0.safetensors"),
    "checkpoint_{n}": ("model.safetensors", "optimizer.bin", "random_states_0.pkl"),
    "step-{n}": (".metadata", "__0_0.distcp"),
    "global_step{n}": ENGINE,
    "epoch=0-step={n}.ckpt": ("latest", *(f"checkpoint/{name}" for name in ENGINE)),
    "epoch=1-step={n}.ckpt": ("",),
    "iter_{n:07d}": ("mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt"),
    "iter_{n:08d}": ("common.pt", "metadata.json", "__0_0.distcp"),
    "epoch_{n}": ("model.pt", "optimizer.pt"),
    "model_{n}.pth": ("",),
    "ckpt_{n}.pth.tar": ("",),
    "resume.pth.tar": ("",),
}
HOLDERS = (
    *("", "", "", "checkpoints/", "ckpt/", "ckpts/", "my_checkpoints/", "version_0/checkpoints/"),
    *("exp/version_0/checkpoints/", "lightning_logs/version_2/checkpoints/"),
    "project/1a2b3c4d/checkpoints/",
)
NOISE = (
    *("events/rank-0.jsonl", "log.jsonl", "config.json", "model.safetensors", "train.py"),
    *("trainer_state.json", "latest", "latest_checkpointed_iteration.txt", "tokenizer.json"),
    *("data/train-0001.arrow", "cache/step_3/part-0.arrow", "shards/train-000001.tar"),
    *(
        ".git/HEAD",
        ".cache/checkpoint-3/trainer_state.json",
        "pretrained.pth",
        "resnet50-0676ba61.pth",
    ),
    *("bert/config.json", "bert/model.safetensors", "best.pt", "data.pt", "tensorboard/events.out"),
    *("other/checkpoint-3/trainer_state.json", "other/checkpoint-3-g1/manifest.json"),
    *("tmp-checkpoint-4/trainer_state.json", "wandb/run-1/files/config.yaml"),
)


def test_guard_random_contents_each_checkpoint_is_seen(draw):
    for _ in range(SITUATIONS):
        names = set(draw.sample(NOISE, draw.randint(0, 5)))
        placed = {
            (draw.choice(HOLDERS) + name.format(n=draw.randint(1, 99)), files)
            for name, files in draw.sample(sorted(CHECKPOINTS.items()), draw.choice((0, 0, 1, 2)))
        }
        for place, files in placed:
            names |= {f"{place}/{file}".rstrip("/") for file in files}
        found = _find_checkpoints(DirectoryListing(dict.fromkeys(names, 1)), "run")
        seen = {one.path.removeprefix("run/") for one in found}
        assert seen == {place for place, _ in placed}, sorted(names)
