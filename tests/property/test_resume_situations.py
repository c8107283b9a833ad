"""Resume policy: 10,000 histories of a repository, each begun, killed, saved and damaged at random.

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
    settle_wish,
)
from resilient.clock import SystemClock
from resilient.distributed.start_identity import StartIdentity
from resilient.elastic.restart_policy import PERMANENT_CODES
from resilient.errors import NoIntactCheckpoint, NothingToResume, RepositoryNotFound, UsageError
from resilient.format.keys import CheckpointId, generation_key
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
        is_ours = draw.choice((False, False, True, None))
        parent = None
        if is_ours is not None and number > 1 and draw.random() < 0.5:
            parent = CheckpointId(draw.randint(1, number - 1), draw.randint(1, 9))
        has_checkpoint = draw.random() < 0.5
        has_mark = draw.random() < (0.9 if has_checkpoint else 0.2)
        generations.append(GenerationFacts(number, is_ours, parent, has_checkpoint, has_mark))
    return ResumeFacts(draw.choice(WISHES), draw.random() < 0.5, tuple(generations))


def test_decide_resume_random_facts_obey_the_wish_or_refuse(draw):
    for _ in range(SITUATIONS):
        facts = situation(draw)
        found = decide_resume(facts).reference
        ours = [one for one in facts.generations if one.is_ours]
        has_saved = any(one.has_checkpoint for one in ours)
        is_doubtful = any(one.has_mark for one in ours) or any(
            one.is_ours is None for one in facts.generations
        )
        if facts.wish == "auto" or has_saved:
            assert found == "auto", facts
        elif found == "":
            assert is_doubtful, facts
        elif facts.wish == "never":
            assert found == "never", facts
        else:
            begun = [one.parent.folder for one in ours if one.parent]
            assert found == (begun[-1] if begun else facts.wish), facts


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
        reference = settle_wish(self.store, wish, [start], is_first=is_first).reference
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
