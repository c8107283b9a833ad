"""Defects of who is blamed for a hang: nobody for a suspension, and one host of several."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SIGHT = "tests/unit/agent/test_sight.py"
MEMBERS = "tests/unit/agent/test_membership.py"

MUTANTS = [
    Mutant(
        "an agent that was suspended counts that time against its ranks",
        "resilient/agent/health/sight.py",
        "        if gap_seconds <= self._away_seconds:\n",
        "        if True:\n",
        SIGHT,
    ),
    Mutant(
        "a look that takes long is an absence",
        "resilient/agent/health/sight.py",
        '        """End a look."""\n        self._until_seconds = now_seconds\n',
        '        """End a look."""\n',
        f"{SIGHT} -k inside",
    ),
    Mutant(
        "a rank that stays stopped was so while the agent was suspended too",
        "resilient/agent/health/ranks.py",
        "self._sight.shifted(stopped_seconds)",
        "stopped_seconds",
        f"{SIGHT} -k stays_stopped",
    ),
    Mutant(
        "a start is over while all are suspended",
        "resilient/agent/health/ranks.py",
        "began_seconds, ended_seconds = shifted(self._began_seconds), self._ended_seconds",
        "began_seconds, ended_seconds = self._began_seconds, self._ended_seconds",
        f"{SIGHT} -k slow_start",
    ),
    Mutant(
        "a step that was suspended is the longest ever after",
        "resilient/agent/health/sight.py",
        "        if now > known and now >= away_seconds:\n",
        "        if False:\n",
        f"{SIGHT} -k learned",
    ),
    Mutant(
        "a node that was suspended has missed others all that time",
        "resilient/agent/nodes/membership.py",
        "            self._roster.forgive()\n",
        "            pass\n",
        f"{MEMBERS} -k suspended",
    ),
    Mutant(
        "a node that was suspended takes the others for silent",
        "resilient/agent/nodes/clocks.py",
        "self._sight.shifted(at_seconds) + lasts_seconds",
        "at_seconds + lasts_seconds",
        "tests/unit/agent/test_heartbeats_seen.py -k suspended",
    ),
]
