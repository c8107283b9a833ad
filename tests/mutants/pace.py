"""How saves rest beside training, broken on purpose."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PACE = "tests/unit/checkpoint/test_pace.py"
KEEPER_PACE = "tests/gang/test_keeper_pace.py"

MUTANTS = [
    Mutant(
        "persisting rests whatever the interval between saves",
        "resilient/checkpoint/throttle.py",
        "    return max(min(worked_seconds * (1 / WORK_SHARE - 1), ahead_seconds), 0.0)",
        "    return max(worked_seconds * (1 / WORK_SHARE - 1), 0.0)",
        PACE,
    ),
    Mutant(
        "the interval between saves is not looked at",
        "resilient/checkpoint/throttle.py",
        "    return min(interval_seconds * INTERVAL_SHARE, seconds_max)",
        "    return seconds_max",
        PACE,
    ),
    Mutant(
        "persisting never rests",
        "resilient/checkpoint/throttle.py",
        "        self._hurry.wait(left_seconds)\n",
        "        pass\n",
        PACE,
    ),
    Mutant(
        "persisting rests beside an idle core",
        "resilient/checkpoint/throttle.py",
        "            if self._is_idle or not due_seconds:",
        "            if not due_seconds:",
        PACE,
    ),
    Mutant(
        "what persisting uses counts as training's",
        "resilient/checkpoint/throttle.py",
        "        idle_seconds = after.idle_seconds - before.idle_seconds + ours_seconds\n",
        "        idle_seconds = after.idle_seconds - before.idle_seconds\n",
        PACE,
    ),
    Mutant(
        "each thread has a share of its own",
        "resilient/checkpoint/throttle.py",
        "            self._until_seconds = max(self._until_seconds, now_seconds) + due_seconds",
        "            self._until_seconds = now_seconds + due_seconds",
        PACE,
    ),
    Mutant(
        "whoever waits for a save waits for its rests too",
        "resilient/checkpoint/save/executor.py",
        "            self._pace.hurry()\n",
        "            pass\n",
        "tests/unit/checkpoint/test_persister.py",
    ),
    Mutant(
        "a rank rests beyond the deadline of its peers",
        "resilient/checkpoint/context.py",
        "return min(self.pace_seconds_max, self.within_seconds * _RESTED_SHARE)",
        "return self.pace_seconds_max",
        "tests/unit/checkpoint/test_persister.py",
    ),
    Mutant(
        "a keeper's save whose rank is gone rests on",
        "resilient/checkpoint/daemon/session.py",
        "            self.pacer.leave()\n",
        "",
        KEEPER_PACE,
    ),
    Mutant(
        "a save that is begun for who is gone rests",
        "resilient/checkpoint/throttle.py",
        "            if self._is_left:\n                self.pace.hurry()\n",
        "",
        KEEPER_PACE,
    ),
    Mutant(
        "another life waits for the rests of the one before",
        "resilient/checkpoint/daemon/server.py",
        "        self._hurry(info.url)\n",
        "",
        KEEPER_PACE,
    ),
    Mutant(
        "a keeper that is to end rests on",
        "resilient/checkpoint/daemon/server.py",
        '        self._hurry("")\n',
        "",
        KEEPER_PACE,
    ),
    Mutant(
        "a keeper is not told that somebody waits",
        "resilient/checkpoint/daemon/client.py",
        "        if listener.is_listening:\n",
        "        if False:\n",
        KEEPER_PACE,
    ),
    Mutant(
        "who waits before a save has begun is forgotten",
        "resilient/checkpoint/daemon/connection.py",
        "is_urgent=is_urgent(), ",
        "",
        KEEPER_PACE,
    ),
    Mutant(
        "that the process is to end hastens no save",
        "resilient/checkpoint/daemon/client.py",
        "self._is_awaited or self._left_seconds() < math.inf",
        "self._is_awaited",
        KEEPER_PACE,
    ),
    Mutant(
        "a rank knows of its own rests alone",
        "resilient/checkpoint/save/persist.py",
        'max(float(report["rested_seconds"]) for report in shown)',
        'float(shown[0]["rested_seconds"])',
        KEEPER_PACE,
    ),
    Mutant(
        "rests that were cut short count as whole",
        "resilient/checkpoint/throttle.py",
        "                self._due_seconds -= max(self._until_seconds - now_seconds, 0.0)\n",
        "",
        PACE,
    ),
    Mutant(
        "a stop takes a save's rests for its work",
        "resilient/train/saver.py",
        "max(took_seconds - rested_seconds, 0.0)",
        "took_seconds",
        "tests/unit/train/test_leaving.py",
    ),
]
