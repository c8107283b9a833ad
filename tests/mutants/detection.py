"""Defects of what finds a hang, tells causes apart and decides what follows."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RULES = "tests/unit/agent/test_heartbeat.py"
PULSE = "tests/unit/agent/test_pulse.py"
STACKS = "tests/unit/agent/test_stacks.py"
CAUSES = "tests/unit/agent/test_causes.py"
HISTORY = "tests/unit/agent/test_history.py"
HANGS = "tests/process/test_hangs.py"
MEMBERS = "tests/unit/agent/test_membership.py"

MUTANTS = [
    Mutant(
        "a node that starts again is lost at once",
        "resilient/agent/nodes/roster.py",
        "now_seconds - seconds > _NOWHERE_SECONDS and not",
        "not",
        MEMBERS,
    ),
    Mutant(
        "a node that waits for the next round is lost",
        "resilient/agent/nodes/roster.py",
        "there = {*state.participants, *state.wait_list, *state.redundancy_list}",
        "there = {*state.participants}",
        MEMBERS,
    ),
    Mutant(
        "a node that left as agreed is lost",
        "resilient/agent/nodes/roster.py",
        " and not self._said_goodbye(node)",
        "",
        MEMBERS,
    ),
    Mutant(
        "a save that a peer's end spoiled is the fault of whoever reports it",
        "resilient/agent/verdict/causes.py",
        "DeadlineExceeded.code, SaveAbandoned.code}",
        "DeadlineExceeded.code}",
        "tests/unit/agent/test_failures.py",
    ),
    Mutant(
        "a rank that waits for others is blamed",
        "resilient/agent/health/heartbeat.py",
        "    behind = [one for one in training if one.signs.step == fewest]\n",
        "    behind = training\n",
        RULES,
    ),
    Mutant(
        "one late rank is enough although the one behind has time",
        "resilient/agent/health/heartbeat.py",
        "all(late[one.rank] is not None for one in behind)",
        "True",
        RULES,
    ),
    Mutant(
        "deadlines have no floor",
        "resilient/agent/health/heartbeat.py",
        "return max(rule.floor_seconds, rule.median_factor * self.median_seconds, twice_seconds)",
        "return max(rule.median_factor * self.median_seconds, twice_seconds)",
        RULES,
    ),
    Mutant(
        "evaluation has the deadline of a step",
        "resilient/agent/health/heartbeat.py",
        "        if phase is not Phase.STEP:\n",
        "        if phase is Phase.FIRST:\n",
        RULES,
    ),
    Mutant(
        "a stopped rank has the patience of what it was doing",
        "resilient/agent/health/heartbeat.py",
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
        "resilient/agent/health/stacks.py",
        "        _send(one.pid, signal.SIGCONT)\n",
        "        pass\n",
        STACKS,
    ),
    Mutant(
        "the workers are killed before their stacks are taken",
        "resilient/agent/health/hanging.py",
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
        "resilient/agent/verdict/decide.py",
        "is_own = not outcome.is_echo and outcome.cause is not Cause.HANG",
        "is_own = not outcome.is_echo",
        f"{HANGS} -k stuck",
    ),
    Mutant(
        "every kill is one for memory",
        "resilient/agent/verdict/causes.py",
        "    if seen.oom_kills:\n",
        "    if seen.oom_kills is not None:\n",
        CAUSES,
    ),
    Mutant(
        "what a control group counted before counts",
        "resilient/agent/health/oom.py",
        "sum(max(0, (now[path] or 0) - before) for path, before in self._before.items())",
        "sum(now[path] or 0 for path in self._before)",
        CAUSES,
    ),
    Mutant(
        "counters are read once the worker is gone",
        "resilient/agent/health/ranks.py",
        "        self._oom.learn(pids.values())\n",
        "",
        "tests/process/test_causes_told.py -k memory",
    ),
    Mutant(
        "one slow step makes a straggler",
        "resilient/agent/health/stragglers.py",
        "rank: statistics.median(one.own_seconds)",
        "rank: max(one.own_seconds)",
        CAUSES,
    ),
    Mutant(
        "failures of long ago count",
        "resilient/agent/verdict/history.py",
        "if not window_seconds or at_seconds - one < window_seconds",
        "if True",
        HISTORY,
    ),
    Mutant(
        "a failure elsewhere counts against this host",
        "resilient/agent/verdict/history.py",
        "mine = () if outcome.is_echo or outcome.cause is Cause.PEER else (at_seconds,)",
        "mine = (at_seconds,)",
        HISTORY,
    ),
    Mutant(
        "an interruption costs a restart",
        "resilient/agent/verdict/decide.py",
        'return _interrupted(budget) or Restart("membership", is_paid=False)',
        'return _interrupted(budget) or Restart("membership", is_paid=True)',
        HISTORY,
    ),
    Mutant(
        "the budget of interruptions never ends",
        "resilient/agent/verdict/decide.py",
        "budget.preemptions_left is None or budget.preemptions_left >= 0",
        "True",
        HISTORY,
    ),
    Mutant(
        "a host that the others need leaves",
        "resilient/agent/verdict/decide.py",
        "    if is_worn and budget.may_leave:\n",
        "    if is_worn:\n",
        HISTORY,
    ),
    Mutant(
        "a script that fails everywhere is held against each host",
        "resilient/agent/verdict/decide.py",
        "        or _of_crash_loop(outcome, budget)\n        or _of_worn_host(outcome, budget)\n",
        "        or _of_worn_host(outcome, budget)\n        or _of_crash_loop(outcome, budget)\n",
        HISTORY,
    ),
    Mutant(
        "a recovery with progress waits",
        "resilient/agent/verdict/decide.py",
        "    repeats = budget.no_progress_lives - 1\n",
        "    repeats = budget.no_progress_lives + 1\n",
        HISTORY,
    ),
    Mutant(
        "restarts are never used up",
        "resilient/agent/verdict/decide.py",
        "    if budget.restarts_left <= 0:\n",
        "    if budget.restarts_left < -9:\n",
        HISTORY,
    ),
    Mutant(
        "a stop during a wait is not heard",
        "resilient/agent/stops.py",
        "        return not self.asked_by\n",
        "        return True\n",
        "tests/process/test_reactions.py -k wait",
    ),
    Mutant(
        "a host is judged by its own clock",
        "resilient/agent/nodes/clocks.py",
        "            beats[node] = self._seen[node].ours\n",
        "            pass\n",
        "tests/unit/agent/test_heartbeats_seen.py -k change",
    ),
    Mutant(
        "a node writes others' heartbeats as it saw them",
        "resilient/agent/nodes/clocks.py",
        "return seen.raw if seen and seen.ours == moment else moment",
        "return moment",
        "tests/unit/agent/test_heartbeats_seen.py -k written",
    ),
    Mutant(
        "a host that is silent lives on",
        "resilient/agent/nodes/clocks.py",
        "is_new = before is None or before.raw != moment",
        "is_new = True",
        "tests/unit/agent/test_heartbeats_seen.py -k change",
    ),
    Mutant(
        "heartbeats carry the time of day of their hosts",
        "resilient/agent/nodes/meeting.py",
        "judge_by_sight(get_rendezvous_handler(told_where(parameters)))",
        "get_rendezvous_handler(told_where(parameters))",
        "tests/process/test_clocks_apart.py -k fast",
    ),
]
