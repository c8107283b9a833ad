"""Defects of what finds a hang, tells causes apart and decides what follows."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RULES = "tests/unit/agent/test_heartbeat.py"
PULSE = "tests/unit/agent/test_pulse.py"
STACKS = "tests/unit/agent/test_stacks.py"
CAUSES = "tests/unit/agent/test_causes.py"
HANGS = "tests/process/test_hangs.py"

MUTANTS = [
    Mutant(
        "a rank that waits for others is blamed",
        "resilient/agent/heartbeat.py",
        "    behind = [one for one in training if one.signs.step == fewest]\n",
        "    behind = training\n",
        RULES,
    ),
    Mutant(
        "one late rank is enough although the one behind has time",
        "resilient/agent/heartbeat.py",
        "all(late[one.rank] is not None for one in behind)",
        "True",
        RULES,
    ),
    Mutant(
        "deadlines have no floor",
        "resilient/agent/heartbeat.py",
        "return max(rule.floor_seconds, rule.median_factor * self.median_seconds, twice_seconds)",
        "return max(rule.median_factor * self.median_seconds, twice_seconds)",
        RULES,
    ),
    Mutant(
        "evaluation has the deadline of a step",
        "resilient/agent/heartbeat.py",
        "        if phase is not Phase.STEP:\n",
        "        if phase is Phase.FIRST:\n",
        RULES,
    ),
    Mutant(
        "a stopped rank has the patience of what it was doing",
        "resilient/agent/heartbeat.py",
        "    if vital.stopped_since_seconds is not None:\n",
        "    if False:\n",
        RULES,
    ),
    Mutant(
        "waiting for data is a part of a step",
        "resilient/world/pulse.py",
        "            self._loaded_seconds += took_seconds\n",
        "            self._in_step_seconds += took_seconds\n",
        PULSE,
    ),
    Mutant(
        "the first step is a measure",
        "resilient/world/pulse.py",
        "        if self._phase is not Phase.FIRST:\n",
        "        if True:\n",
        PULSE,
    ),
    Mutant(
        "a stopped rank stays stopped when it is asked for its stack",
        "resilient/agent/stacks.py",
        "        _send(one.pid, signal.SIGCONT)\n",
        "        pass\n",
        STACKS,
    ),
    Mutant(
        "the workers are killed before their stacks are taken",
        "resilient/agent/hanging.py",
        "    stacks = health.stacks(group.pids)\n",
        "    group.kill()\n    stacks = health.stacks(group.pids)\n",
        f"{HANGS} -k stuck",
    ),
    Mutant(
        "the trainer shows no progress",
        "resilient/train/trainer.py",
        "        self.session.pulse.end_step(state.global_step)\n",
        "",
        f"{HANGS} -k stopped",
    ),
    Mutant(
        "a hang is a failure that another try would end the same way",
        "resilient/agent/decide.py",
        " and not outcome.is_echo and not is_hang:",
        " and not outcome.is_echo:",
        f"{HANGS} -k stuck",
    ),
    Mutant(
        "every kill is one for memory",
        "resilient/agent/causes.py",
        "    if seen.oom_kills:\n",
        "    if seen.oom_kills is not None:\n",
        CAUSES,
    ),
    Mutant(
        "what a control group counted before counts",
        "resilient/agent/oom.py",
        "sum(max(0, (now[path] or 0) - before) for path, before in self._before.items())",
        "sum(now[path] or 0 for path in self._before)",
        CAUSES,
    ),
    Mutant(
        "counters are read once the worker is gone",
        "resilient/agent/health.py",
        "        self._oom.learn(pids.values())\n",
        "",
        "tests/process/test_causes_told.py -k memory",
    ),
    Mutant(
        "one slow step makes a straggler",
        "resilient/agent/stragglers.py",
        "rank: statistics.median(one.own_seconds)",
        "rank: max(one.own_seconds)",
        CAUSES,
    ),
]
