"""Defects of what finds a hang, tells causes apart and decides what follows."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RULES = "tests/unit/elastic/test_heartbeat.py"
PULSE = "tests/unit/elastic/test_pulse.py"
STACKS = "tests/unit/elastic/test_stacks.py"
CAUSES = "tests/unit/elastic/test_causes.py"
HISTORY = "tests/unit/elastic/test_history.py"
HANGS = "tests/process/test_hangs.py"
MEMBERS = "tests/unit/elastic/test_membership.py"
EDGES = "tests/unit/elastic/test_edges.py"
OUTSIDE = "tests/process/test_stuck_outside.py"

MUTANTS = [
    Mutant(
        "a node that starts again is lost at once",
        "resilient/elastic/rendezvous/roster.py",
        "now_seconds - seconds > _NOWHERE_SECONDS and not",
        "not",
        MEMBERS,
    ),
    Mutant(
        "a node that waits for the next round is lost",
        "resilient/elastic/rendezvous/roster.py",
        "there = {*state.participants, *state.wait_list, *state.redundancy_list}",
        "there = {*state.participants}",
        MEMBERS,
    ),
    Mutant(
        "a node that left as agreed is lost",
        "resilient/elastic/rendezvous/roster.py",
        " and not self._said_goodbye(node)",
        "",
        MEMBERS,
    ),
    Mutant(
        "a save that a peer's end spoiled is the fault of whoever reports it",
        "resilient/elastic/outcome.py",
        "DeadlineExceeded.code, SaveAbandoned.code}",
        "DeadlineExceeded.code}",
        "tests/unit/elastic/test_failures.py",
    ),
    Mutant(
        "a rank that waits for others is blamed",
        "resilient/elastic/hang_detection.py",
        (
            "    behind = [rank_vitals for rank_vitals in training if "
            "rank_vitals.signs.step == fewest]\n"
        ),
        "    behind = training\n",
        RULES,
    ),
    Mutant(
        "one late rank is enough although the one behind has time",
        "resilient/elastic/hang_detection.py",
        "all(late[rank_vitals.rank] is not None for rank_vitals in behind)",
        "True",
        RULES,
    ),
    Mutant(
        "deadlines have no floor",
        "resilient/elastic/hang_detection.py",
        "return max(rule.floor_seconds, rule.median_factor * self.median_seconds, twice_seconds)",
        "return max(rule.median_factor * self.median_seconds, twice_seconds)",
        RULES,
    ),
    Mutant(
        "evaluation has the deadline of a step",
        "resilient/elastic/hang_detection.py",
        "        if phase is not Phase.STEP:\n",
        "        if phase is Phase.FIRST:\n",
        RULES,
    ),
    Mutant(
        "a stopped rank has the patience of what it was doing",
        "resilient/elastic/hang_detection.py",
        "    if vital.stopped_since_seconds is not None:\n",
        "    if False:\n",
        RULES,
    ),
    Mutant(
        "waiting for data is a part of a step",
        "resilient/distributed/heartbeat.py",
        "            self._loaded_seconds += took_seconds\n",
        "            self._in_step_seconds += took_seconds\n",
        PULSE,
    ),
    Mutant(
        "the first step is a measure",
        "resilient/distributed/heartbeat.py",
        "        if self._phase is not Phase.FIRST:\n",
        "        if True:\n",
        PULSE,
    ),
    Mutant(
        "a stopped rank stays stopped when it is asked for its stack",
        "resilient/elastic/stack_dump.py",
        "        _send(value.pid, signal.SIGCONT)\n",
        "        pass\n",
        STACKS,
    ),
    Mutant(
        "a rank that never begins is waited for for ever",
        "resilient/elastic/health_monitor.py",
        "            or find_stuck_start(seen, rule, began_seconds, now_seconds)\n",
        "",
        f"{OUTSIDE} -k never_begins",
    ),
    Mutant(
        "a rank that does not end is waited for for ever",
        "resilient/elastic/health_monitor.py",
        "            or find_stuck_end(seen, rule, ended_seconds, now_seconds)\n",
        "",
        f"{OUTSIDE} -k does_not_end",
    ),
    Mutant(
        "who waits in training for one that never begins is blamed",
        "resilient/elastic/health_monitor.py",
        "        if find_starting(seen):\n",
        "        if False:\n",
        f"{OUTSIDE} -k blamed_by",
    ),
    Mutant(
        "the trainer is not heard of before it has met the others",
        "resilient/train/session.py",
        ("    pulse = progress_reporter()\n    rank_group = join(partial(_backend, args))\n"),
        ("    gang = join(partial(_backend, args))\n    pulse = progress_reporter()\n"),
        f"{OUTSIDE} -k before",
    ),
    Mutant(
        "a rank that never began has no stack",
        "resilient/elastic/workers/bootstrap.py",
        "    _answer_with_stacks(arguments)\n",
        "",
        f"{OUTSIDE} -k never_begins",
    ),
    Mutant(
        "a program is asked for a stack and dies of it",
        "resilient/elastic/workers/bootstrap.py",
        'if not notes or arguments[:1] == ["--exec"]:',
        "if not notes:",
        "tests/process/test_programs.py -k stacks",
    ),
    Mutant(
        "ranks that all start slowly hang",
        "resilient/elastic/hang_detection.py",
        "        or min(reaches) == max(reaches)\n",
        "",
        EDGES,
    ),
    Mutant(
        "a rank without signs is blamed although steps are done without it",
        "resilient/elastic/hang_detection.py",
        "        or any(rank_vitals.step >= 0 for rank_vitals in seen)\n",
        "",
        EDGES,
    ),
    Mutant(
        "a start has no patience after a sign",
        "resilient/elastic/hang_detection.py",
        (
            "max(\n"
            "        [began_seconds, *(rank_vitals.quiet_since(began_seconds) for "
            "rank_vitals in seen)]\n"
            "    )"
        ),
        "began_seconds",
        EDGES,
    ),
    Mutant(
        "who still trains is not waited for at the end",
        "resilient/elastic/hang_detection.py",
        (
            "if not reporting or any(\n"
            "        rank_vitals.reach is StartupStage.TRAINING for rank_vitals in "
            "reporting\n"
            "    ):"
        ),
        "if not reporting:",
        EDGES,
    ),
    Mutant(
        "hosts whose ranks have ended say nothing to those whose ranks do not",
        "resilient/elastic/health_monitor.py",
        " or (is_idle and is_over_elsewhere()):",
        ":",
        "tests/unit/elastic/test_ends_elsewhere.py",
    ),
    Mutant(
        "a store that is lost ends a job",
        "resilient/elastic/rendezvous/membership.py",
        "        except dist.DistError:\n            return False\n",
        "        except dist.DistError:\n            return True\n",
        MEMBERS,
    ),
    Mutant(
        "the workers are killed before their stacks are taken",
        "resilient/elastic/attempt_monitor.py",
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
        "resilient/elastic/restart_policy.py",
        "is_own = not outcome.is_echo and outcome.cause is not Cause.HANG",
        "is_own = not outcome.is_echo",
        f"{HANGS} -k stuck",
    ),
    Mutant(
        "every kill is one for memory",
        "resilient/elastic/outcome.py",
        "    if seen.oom_kills:\n",
        "    if seen.oom_kills is not None:\n",
        CAUSES,
    ),
    Mutant(
        "what a control group counted before counts",
        "resilient/elastic/health_monitor.py",
        "sum(max(0, (now[path] or 0) - before) for path, before in self._before.items())",
        "sum(now[path] or 0 for path in self._before)",
        CAUSES,
    ),
    Mutant(
        "counters are read once the worker is gone",
        "resilient/elastic/health_monitor.py",
        "        self._oom.learn(pids.values())\n",
        "",
        "tests/process/test_causes_told.py -k memory",
    ),
    Mutant(
        "one slow step makes a straggler",
        "resilient/elastic/health_monitor.py",
        "rank: statistics.median(progress.own_seconds)",
        "rank: max(progress.own_seconds)",
        CAUSES,
    ),
    Mutant(
        "failures of long ago count",
        "resilient/elastic/restart_policy.py",
        "if not window_seconds or at_seconds - time < window_seconds",
        "if True",
        HISTORY,
    ),
    Mutant(
        "a failure elsewhere counts against this host",
        "resilient/elastic/restart_policy.py",
        ("own_failure = () if outcome.is_echo or outcome.cause is Cause.PEER else (at_seconds,)"),
        "mine = (at_seconds,)",
        HISTORY,
    ),
    Mutant(
        "an interruption costs a restart",
        "resilient/elastic/restart_policy.py",
        'return _interrupted(budget) or Restart("membership", is_paid=False)',
        'return _interrupted(budget) or Restart("membership", is_paid=True)',
        HISTORY,
    ),
    Mutant(
        "the budget of interruptions never ends",
        "resilient/elastic/restart_policy.py",
        "budget.preemptions_left is None or budget.preemptions_left >= 0",
        "True",
        HISTORY,
    ),
    Mutant(
        "a host that the others need leaves",
        "resilient/elastic/restart_policy.py",
        "    if is_worn and budget.may_leave:\n",
        "    if is_worn:\n",
        HISTORY,
    ),
    Mutant(
        "a script that fails everywhere is held against each host",
        "resilient/elastic/restart_policy.py",
        "        or _of_crash_loop(outcome, budget)\n        or _of_worn_host(outcome, budget)\n",
        "        or _of_worn_host(outcome, budget)\n        or _of_crash_loop(outcome, budget)\n",
        HISTORY,
    ),
    Mutant(
        "a recovery with progress waits",
        "resilient/elastic/restart_policy.py",
        "    repeats = 0 if outcome.is_robbed else budget.no_progress_lives - 1\n",
        "    repeats = budget.no_progress_lives + 1\n",
        HISTORY,
    ),
    Mutant(
        "restarts are never used up",
        "resilient/elastic/restart_policy.py",
        "    if budget.restarts_left <= 0:\n",
        "    if budget.restarts_left < -9:\n",
        HISTORY,
    ),
    Mutant(
        "a stop during a wait is not heard",
        "resilient/elastic/signals.py",
        "        return not self.asked_by\n",
        "        return True\n",
        "tests/process/test_reactions.py -k wait",
    ),
    Mutant(
        "a host is judged by its own clock",
        "resilient/elastic/rendezvous/connect.py",
        "            beats[node] = self._seen[node].ours\n",
        "            pass\n",
        "tests/unit/elastic/test_heartbeats_seen.py -k change",
    ),
    Mutant(
        "a node writes others' heartbeats as it saw them",
        "resilient/elastic/rendezvous/connect.py",
        "return seen.raw if seen and seen.ours == moment else moment",
        "return moment",
        "tests/unit/elastic/test_heartbeats_seen.py -k written",
    ),
    Mutant(
        "a host that is silent lives on",
        "resilient/elastic/rendezvous/connect.py",
        "is_new = before is None or before.raw != moment",
        "is_new = True",
        "tests/unit/elastic/test_heartbeats_seen.py -k change",
    ),
    Mutant(
        "heartbeats carry the time of day of their hosts",
        "resilient/elastic/rendezvous/connect.py",
        "judge_by_sight(get_rendezvous_handler(told_where(parameters)))",
        "get_rendezvous_handler(told_where(parameters))",
        "tests/process/test_clocks_apart.py -k fast",
    ),
]
