"""Any history of lives, saves, rotations, damage and rollbacks, against a plain model of it.

Most of the state never changes, so checkpoints refer to files of older ones.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from resilient.checkpoint.catalog import committed, lineage, read_manifest
from resilient.checkpoint.garbage_collection import collect_garbage
from resilient.checkpoint.refs import create_tag, read_tags, remove_tag
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.retention import Retention
from resilient.clock import SystemClock
from resilient.errors import Fenced, ResilientError, UsageError
from resilient.format.keys import CheckpointId, split_checkpoint_key
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import begin, frozen_parts_of, save


class Vault(RuleBasedStateMachine):
    """The model: the lives with their parents, and which checkpoints exist."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.parents: dict[int, CheckpointId | None] = {}
        self.there: set[CheckpointId] = set()
        self.needs: dict[CheckpointId, set[str]] = {}
        self.flipped: set[str] = set()
        self.tags: dict[str, CheckpointId] = {}

    @property
    def life(self) -> int:
        return max(self.parents, default=0)

    @property
    def damaged(self) -> set[CheckpointId]:
        return {one for one in self.there if self.needs[one] & self.flipped}

    def line(self) -> list[CheckpointId]:
        """Return what resume may use, by the definition: down the parents, falling steps."""
        return self.descent()[0]

    def descent(self) -> tuple[list[CheckpointId], set[int]]:
        """Return what resume may use, and the lives from which the newest one descends."""
        found, lives, generation, bound = [], set(), self.life, float("inf")
        while generation:
            lives.add(generation)
            own = [one for one in self.there if one.generation == generation and one.step <= bound]
            found += sorted(own, reverse=True)
            parent = self.parents[generation]
            if parent is None and not own:
                generation, bound = generation - 1, float("inf")
            else:
                generation, bound = (parent.generation, parent.step) if parent else (0, 0)
        return found, lives

    def separate(self) -> set[CheckpointId]:
        """Return what descends from another start than the line does."""
        # A life counts although the checkpoint from which the next life began is deleted.
        ours = self.descent()[1]
        found = set()
        for one in self.there:
            generation = one.generation
            while generation not in ours and self.parents[generation]:
                generation = self.parents[generation].generation
            if generation not in ours:
                found.add(one)
        return found

    @rule()
    def resume(self) -> None:
        """A life begins from the first checkpoint that is whole."""
        parent = next((one for one in self.line() if one not in self.damaged), None)
        assert begin(self.store, parent) == self.life + 1
        self.parents[self.life + 1] = parent

    @initialize()
    def start(self) -> None:
        self.start_over()

    @rule()
    def start_over(self) -> None:
        begin(self.store, None)
        self.parents[self.life + 1] = None

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def roll_back(self, data) -> None:
        parent = data.draw(st.sampled_from(sorted(self.there)))
        begin(self.store, parent)
        self.parents[self.life + 1] = parent

    @precondition(lambda self: self.life)
    @rule(several=st.lists(st.integers(1, 3), min_size=1, max_size=4))
    def save(self, several) -> None:
        for steps in several:
            self.save_one(steps)

    def save_one(self, steps) -> None:
        own = [one.step for one in self.there if one.generation == self.life]
        parent = self.parents[self.life]
        step = max([*own, parent.step if parent else 0]) + steps
        # The newest of the life, else where it began, which was read and proved.
        newest = [CheckpointId(self.life, max(own))] if own else [parent] if parent else []
        new = CheckpointId(self.life, step)
        save(self.store, new, bases=newest, parts=frozen_parts_of(step))
        self.there.add(new)
        manifest = read_manifest(self.store, new)
        self.needs[new] = {manifest.key(one.name) for one in manifest.files}

    @precondition(lambda self: self.life > 1)
    @rule(step=st.integers(100, 999))
    def a_stale_process_saves(self, step) -> None:
        with pytest.raises(Fenced):
            save(self.store, CheckpointId(self.life - 1, step))
        before = committed(self.store)
        with suppress(Fenced):  # unless nothing was doomed
            collect_garbage(self.store, Retention(1), self.life - 1)
        assert committed(self.store) == before

    @precondition(lambda self: self.there - self.damaged)
    @rule(data=st.data())
    def damage(self, data) -> None:
        victim = data.draw(st.sampled_from(sorted(self.there - self.damaged)))
        key = data.draw(st.sampled_from(sorted(self.needs[victim])))
        content = self.store.objects[key]
        self.store.objects[key] = content[:-1] + bytes([content[-1] ^ 1])
        self.flipped.add(key)

    @precondition(lambda self: self.there)
    @rule(data=st.data(), name=st.sampled_from(("a", "b")))
    def tag(self, data, name) -> None:
        named = data.draw(st.sampled_from(sorted(self.there)))
        if self.tags.get(name, named) == named:
            create_tag(self.store, name, named, SystemClock())
            self.tags[name] = named
        else:
            with pytest.raises(UsageError):
                create_tag(self.store, name, named, SystemClock())

    @precondition(lambda self: self.tags)
    @rule(data=st.data())
    def untag(self, data) -> None:
        name = data.draw(st.sampled_from(sorted(self.tags)))
        assert remove_tag(self.store, name) == self.tags.pop(name)

    @precondition(lambda self: len(self.there) > 1)
    @rule(limit=st.integers(1, 3))
    def rotate(self, limit) -> None:
        line = self.line()
        gone = set(collect_garbage(self.store, Retention(limit), self.life).doomed)
        order = [*line, *sorted(self.there - set(line) - self.separate(), reverse=True)]
        # With nothing to resume from, what a person may still want is not let go.
        assert gone == (set(order[limit:]) - set(self.tags.values()) if line else set())
        self.there -= gone
        if line:
            needed = {key for one in self.there for key in self.needs[one]}
            old = {one for one in self.files() if split_checkpoint_key(one)[0] < max(self.there)}
            assert old <= needed, "what nobody needs any more is gone"

    def files(self) -> set[str]:
        keys = {key for key in self.store.objects if key.startswith("checkpoint-")}
        return {key for key in keys if not key.endswith("manifest.json")}

    @invariant()
    def what_a_checkpoint_needs_is_there(self) -> None:
        assert {key for one in self.there for key in self.needs[one]} <= self.files()

    @invariant()
    def what_exists_is_what_the_model_says(self) -> None:
        assert committed(self.store) == sorted(self.there, reverse=True)

    @invariant()
    def every_tag_names_what_is_there(self) -> None:
        assert {one.name: one.checkpoint for one in read_tags(self.store)} == self.tags
        assert set(self.tags.values()) <= self.there

    @invariant()
    def what_resume_may_use_is_the_line(self) -> None:
        known = lineage(self.store)
        assert list(known.candidates) == self.line()
        assert set(known.separate) == self.separate()
        assert set(known.abandoned) == self.there - set(self.line()) - self.separate()

    @invariant()
    def damage_and_only_damage_is_refused(self) -> None:
        for one in self.there:
            try:
                read(self.store, one)
                whole = True
            except ResilientError:
                whole = False
            assert whole == (one not in self.damaged)


Vault.TestCase.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
TestVault = Vault.TestCase
