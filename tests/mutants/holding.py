"""Defects of steps that only memory holds."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

HELD = "tests/process/test_held_steps.py"
CHOICE = "tests/unit/checkpoint/test_choose_step.py"
PEEK = "tests/unit/train/test_peeking.py"
AGAIN = "tests/unit/state_dict/test_known_again.py"
SEAT = "resilient/checkpoint/daemon/session.py"
SLATE = "resilient/checkpoint/daemon/step_slots.py"
SLATES = "tests/unit/checkpoint/test_slate.py"
RECALL = "resilient/state_dict/capture_cache.py"

MUTANTS = [
    Mutant(
        "copies of a held step do not wait for a lull",
        "resilient/checkpoint_engine.py",
        "        begin.wait()\n",
        "        pass\n",
        "tests/unit/test_lull.py",
    ),
    Mutant(
        "a step lands that one rank holds",
        SEAT,
        "set.intersection(*(set(steps_of_rank) for steps_of_rank in steps_by_rank))",
        "set.union(*(set(steps_of_rank) for steps_of_rank in steps_by_rank))",
        CHOICE,
    ),
    Mutant(
        "only the newest step is looked at",
        SEAT,
        "    for step in steps:\n",
        "    for step in steps[:1]:\n",
        CHOICE,
    ),
    Mutant(
        "a step lands that is older than what is committed",
        SEAT,
        " and (not there or there[0] < step)",
        "",
        CHOICE,
    ),
    Mutant(
        "the loss of a step is summed before the step before it is copied",
        "resilient/train/run.py",
        '        with timing("saving", _STALL_SECONDS):\n            self.saver.before_update()\n'
        "        if self.saver.caches_next_step():\n",
        "        if self.saver.caches_next_step():\n"
        "            self.meters.begin_mean(self.saver.near_sums)\n"
        '        with timing("saving", _STALL_SECONDS):\n            self.saver.before_update()\n'
        "        if False:\n",
        "tests/unit/train/test_begun_means.py",
    ),
    Mutant(
        "a sum that was begun is not waited for",
        "resilient/train/meters.py",
        "    work.wait()\n",
        "",
        "tests/process/test_means.py",
    ),
    Mutant(
        "a keeper whose agent was killed does not wait for ranks that hold",
        "resilient/checkpoint/daemon/server.py",
        ("            self._holding()\n            or self._busy"),
        "            self._busy",
        f"{HELD} -k agent_was_killed",
    ),
    Mutant(
        "nobody else is told that a step is held",
        "resilient/checkpoint/daemon/server.py",
        "                marks.enter_context(self._room.saving(url))\n",
        "                pass\n",
        f"{HELD} -k agent_was_killed",
    ),
    Mutant(
        "a worker that loads data is taken for its rank",
        "resilient/checkpoint/daemon/connection.py",
        "os.register_at_fork(after_in_child=_leave_to_parent)",
        "",
        f"{HELD} -k loses_nothing",
    ),
    Mutant(
        "what holds steps keeps its memory from a save",
        "resilient/checkpoint/daemon/step_cache.py",
        "    persister.leased.make_room = holder.release\n",
        "",
        f"{HELD} -k memory_of_held",
    ),
    Mutant(
        "what gave its memory to a save holds on",
        "resilient/checkpoint/daemon/step_cache.py",
        'if self._is_released and verb == "reserve":',
        "if False:",
        f"{HELD} -k memory_of_held",
    ),
    Mutant(
        "memory that the keeper gave away is used",
        "resilient/checkpoint/daemon/memory.py",
        "no longer has what there was.\n            self._held.pop(name, None)\n",
        "no longer has what there was.\n",
        "tests/unit/checkpoint/test_room.py",
    ),
    Mutant(
        "what holds steps gives its memory where that is not enough",
        "resilient/checkpoint/daemon/step_cache.py",
        " or self._leased.size_bytes < needed_bytes",
        "",
        f"{HELD} -k room_enough",
    ),
    Mutant(
        "a step lands on top of a save that failed",
        SEAT,
        "steps_by_rank[0][step.folder] in roots and ",
        "",
        CHOICE,
    ),
    Mutant(
        "a new life does not wait for the ranks of the old one",
        "resilient/checkpoint/daemon/server.py",
        "(older := self._holding_before(info)) or self._is_saving(info.url)",
        ("(older := list[StepCacheSession]()) or self._is_saving(info.url)"),
        f"{HELD} -k waited_for",
    ),
    Mutant(
        "what a rank told counts only until it dies",
        "resilient/checkpoint/daemon/server.py",
        "                with suppress(OSError):\n                    lines.send(answer)\n",
        "                lines.send(answer)\n",
        "tests/unit/checkpoint/test_keeper_hears_all.py",
    ),
    Mutant(
        "a held step lands before the save that is on its way",
        SEAT,
        "if self._whole and not self._settled(self):",
        "if False:",
        f"{HELD} -k newest_save",
    ),
    Mutant(
        "a peek forgets what a save then lacks",
        "resilient/train/ledger.py",
        "        self._entries += len(new)\n",
        "        self._entries += len(new)\n        entries.clear()\n",
        PEEK,
    ),
    Mutant(
        "steps of an older chain are told on",
        "resilient/train/ledger.py",
        "self._of is None or self._of[0] is not chain or self._of[1] is not entries",
        "self._of is None",
        PEEK,
    ),
    Mutant(
        "keys and kinds of containers are taken for the known ones",
        RECALL,
        "walk.places == self._places and ",
        "",
        AGAIN,
    ),
    Mutant(
        "a place in a container is taken for another",
        RECALL,
        "        self.places.append(key)\n        return self.visit(value)",
        "        return self.visit(value)",
        AGAIN,
    ),
    Mutant(
        "another dtype of the same memory is not seen",
        RECALL,
        "[*map(_dtype, live)] != self._dtypes",
        "len(live) != len(self._dtypes)",
        AGAIN,
    ),
    Mutant(
        "other memory in the same place is not seen",
        RECALL,
        "all(map(torch.Tensor.is_set_to, live, self._seen))",
        "len(live) == len(self._seen)",
        AGAIN,
    ),
    Mutant(
        "changes are counted by a tensor that training no longer has",
        RECALL,
        "[*map(_changes, live)] == [*map(_changes, self._seen)]",
        "len(live) == len(self._seen)",
        AGAIN,
    ),
    Mutant(
        "a key that looks like a tag is one",
        RECALL,
        '        if not _WORDS.issuperset(map(type, value)) or "$" in "".join(value):',
        "        if not _WORDS.issuperset(map(type, value)):",
        AGAIN,
    ),
    Mutant(
        "memory that a storage no longer has is copied",
        "resilient/state_dict/host_copy.py",
        "if addresses != self._addresses:",
        "if not self._addresses:",
        AGAIN,
    ),
    Mutant(
        "a copy that is made again counts changes from its first time",
        "resilient/state_dict/staging.py",
        "            copy.renew()",
        "            pass",
        AGAIN,
    ),
    Mutant(
        "a file is copied to where it was in memory that is gone",
        "resilient/state_dict/staging.py",
        "        self.splits.forget(name)\n",
        "",
        AGAIN,
    ),
    Mutant(
        "what is no longer steady is still copied later",
        "resilient/state_dict/staging.py",
        "known is None or (known.steady, known.small) != (steady, small)",
        "known is None",
        AGAIN,
    ),
    Mutant(
        "a header that says other numbers is the one before",
        "resilient/state_dict/planner.py",
        ("elif not is_same_json(tree, part.tree):"),
        "elif False:",
        AGAIN,
    ),
    Mutant(
        "a slot that is overwritten counts as whole",
        SLATE,
        "            self._said[:_WORD_BYTES] = _VOID\n",
        "            pass\n",
        f"{HELD} -k overwritten",
    ),
    Mutant(
        "what was given up lands all the same",
        "resilient/checkpoint/daemon/step_cache.py",
        ("        for slots in self._slates:\n            slots.invalidate()\n"),
        "        pass\n",
        f"{HELD} -k given_up",
    ),
    Mutant(
        "a rank that is still there is believed",
        SEAT,
        "        if is_gone:\n",
        "        if True:\n",
        f"{HELD} -k not_believed",
    ),
    Mutant(
        "a keeper that is gone is not missed",
        "resilient/checkpoint/daemon/step_cache.py",
        "        self._talk.require_there()\n",
        "",
        f"{HELD} -k missed",
    ),
    Mutant(
        "a look waits for the keeper",
        "resilient/checkpoint/daemon/connection.py",
        "if not self._there.poll(0) or ",
        "if ",
        "tests/unit/checkpoint/test_conversation.py",
    ),
    Mutant(
        "a step is whole before it is said",
        SLATE,
        "        self._said[_HEAD_BYTES:end] = message\n",
        '        self._said[:_WORD_BYTES] = len(message).to_bytes(_WORD_BYTES, "little")\n'
        "        self._said[_HEAD_BYTES:end] = message\n",
        SLATES,
    ),
    Mutant(
        "a message is believed that does not prove itself",
        SLATE,
        ("    if _proof(message, (hashlib.sha256(note).digest() for note in notes)) != proof:\n"),
        "    if not proof:\n",
        SLATES,
    ),
    Mutant(
        "notes are not proved",
        SLATE,
        'b"".join([*digests, message])',
        "message",
        SLATES,
    ),
    Mutant(
        "rows of a ledger are not proved",
        "resilient/checkpoint/daemon/step_slots.py",
        'if (len(rows), segment.head) != (count, message["head"]):',
        "if len(rows) != count:",
        SLATES,
    ),
    Mutant(
        "rows go on from those of another segment",
        SLATE,
        "            self._of == _beginning(segment)\n            and ",
        "            ",
        SLATES,
    ),
    Mutant(
        "rows that became others are not put down again",
        SLATE,
        "            and (not count or segment.rows[count - 1] == self._last)\n",
        "",
        SLATES,
    ),
    Mutant(
        "all rows are put down at each turn",
        SLATE,
        "data = _lines(segment.rows[self._count :])",
        "self._used, data = 0, _lines(segment.rows)",
        SLATES,
    ),
    Mutant(
        "a number is taken for an equal one",
        "resilient/checkpoint/daemon/step_slots.py",
        "all(map(is_, compress(values, is_other), others))",
        "[*compress(values, is_other)] == others",
        SLATES,
    ),
    Mutant(
        "a layout that changed is not told",
        SLATE,
        " or known[name].value != value",
        "",
        f"{HELD} {SLATES}",
    ),
    Mutant(
        "a note is put over another",
        SLATE,
        "len(note) <= self._known[name].room_bytes",
        "bool(note)",
        SLATES,
    ),
    Mutant(
        "both slots say in the same place what they hold",
        SLATE,
        'return f"slate/{slot}/{name}"',
        'return f"slate/{name}"',
        HELD,
    ),
]
