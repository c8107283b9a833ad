"""Defects of steps that the saver daemon caches in memory."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "the notes of a cached step have no fence token",
        "resilient/checkpoint/daemon/step_slots.py",
        '        "token": job.token,\n',
        '        "token": "",\n',
        "tests/process/test_fence_keeper.py -k cached_step",
    ),
    Mutant(
        "a step cache that gave up its memory continues to use it",
        "resilient/checkpoint/daemon/step_cache.py",
        'if self._is_released and verb == "reserve":',
        "if False:",
        "tests/process/test_held_steps.py -k memory_of_held",
        promise="Failures of processes",
    ),
    Mutant(
        "a slot counts as valid while it is overwritten",
        "resilient/checkpoint/daemon/step_slots.py",
        "            self._message[:_WORD_BYTES] = _EMPTY_WORD\n",
        "            pass\n",
        "tests/process/test_held_steps.py -k overwritten",
        promise="Failures of processes",
    ),
    Mutant(
        "an invalidated step is committed",
        "resilient/checkpoint/daemon/step_cache.py",
        ("        for slots in self._slots:\n            slots.invalidate()\n"),
        "        pass\n",
        "tests/process/test_held_steps.py -k given_up",
        promise="Failures of processes",
    ),
    Mutant(
        "a lost daemon is not noticed by the step cache",
        "resilient/checkpoint/daemon/step_cache.py",
        "        self._connection.require_alive()\n",
        "",
        "tests/process/test_held_steps.py -k missed",
        promise="Failures of processes",
    ),
    Mutant(
        "a cached step is published before it is complete",
        "resilient/checkpoint/daemon/step_slots.py",
        "        self._message[_HEAD_BYTES:end] = message\n",
        (
            '        self._message[:_WORD_BYTES] = len(message).to_bytes(_WORD_BYTES, "little")\n'
            "        self._message[_HEAD_BYTES:end] = message\n"
        ),
        "tests/unit/checkpoint/test_slate.py",
        promise="Failures of processes",
    ),
    Mutant(
        "the digest of a slot message is not checked",
        "resilient/checkpoint/daemon/step_slots.py",
        "    if _proof(message, (hashlib.sha256(note).digest() for note in notes)) != proof:\n",
        "    if not proof:\n",
        "tests/unit/checkpoint/test_slate.py",
        promise="Failures of processes",
    ),
    Mutant(
        "the digests of slot notes are not checked",
        "resilient/checkpoint/daemon/step_slots.py",
        'b"".join([*digests, message])',
        "message",
        "tests/unit/checkpoint/test_slate.py",
        promise="Failures of processes",
    ),
    Mutant(
        "ledger rows in a slot are not verified",
        "resilient/checkpoint/daemon/step_slots.py",
        'if (len(rows), segment.head) != (count, message["head"]):',
        "if len(rows) != count:",
        "tests/unit/checkpoint/test_slate.py",
        promise="Failures of processes",
    ),
    Mutant(
        "ledger rows continue those of another segment",
        "resilient/checkpoint/daemon/step_slots.py",
        ("            self._source == _segment_start(segment)\n            and "),
        "            ",
        "tests/unit/checkpoint/test_slate.py",
        promise="Failures of processes",
    ),
    Mutant(
        "changed ledger rows are not written again",
        "resilient/checkpoint/daemon/step_slots.py",
        "            and (not count or segment.rows[count - 1] == self._last)\n",
        "",
        "tests/unit/checkpoint/test_slate.py",
        promise="Failures of processes",
    ),
    Mutant(
        "a value of another type counts as equal",
        "resilient/checkpoint/daemon/step_slots.py",
        "all(map(is_, compress(values, is_other), other_values))",
        "[*compress(values, is_other)] == other_values",
        "tests/unit/checkpoint/test_slate.py",
        promise="Failures of processes",
    ),
    Mutant(
        "a changed layout is not published",
        "resilient/checkpoint/daemon/step_slots.py",
        " or stored_notes[name].value != value",
        "",
        "tests/process/test_held_steps.py tests/unit/checkpoint/test_slate.py",
        promise="Failures of processes",
    ),
    Mutant(
        "a longer note overwrites the next one",
        "resilient/checkpoint/daemon/step_slots.py",
        "len(note) <= self._stored_notes[name].reserved_bytes",
        "bool(note)",
        "tests/unit/checkpoint/test_slate.py",
        promise="Failures of processes",
    ),
    Mutant(
        "both slots share one place for notes",
        "resilient/checkpoint/daemon/step_slots.py",
        'return f"slate/{slot}/{name}"',
        'return f"slate/{name}"',
        "tests/process/test_held_steps.py",
        promise="Failures of processes",
    ),
]
