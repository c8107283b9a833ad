"""Defects of when saves are made."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

INTERVAL = "tests/unit/goodput/test_interval.py"
CADENCE = "tests/unit/train/test_cadence.py"
DURABLE = "tests/unit/checkpoint/test_durable_cadence.py"
PLAN = "tests/cli/test_plan.py"

MUTANTS = [
    Mutant(
        "the formula falls as saves get dear",
        "resilient/save_interval.py",
        "young * (1 + root / 3 + root * root / 9) - cost_seconds",
        "young - cost_seconds",
        f"{INTERVAL} -k grows",
    ),
    Mutant(
        "saves may take any share of the time",
        "resilient/save_interval.py",
        'for least, name in ((overhead, "overhead"), (bounds.land_seconds, "landing")):',
        'for least, name in ((bounds.land_seconds, "landing"),):',
        f"{INTERVAL} -k bound",
    ),
    Mutant(
        "a preempted run counts as one that fails",
        "resilient/save_interval.py",
        "failures += cause in losses",
        'failures += cause != "membership"',
        f"{INTERVAL} -k preemptions",
    ),
    Mutant(
        "a run that never failed never will",
        "resilient/save_interval.py",
        "return (seen_seconds + PRIOR_SECONDS) / (self.failures + 1)",
        "return seen_seconds / (self.failures + 1)",
        f"{INTERVAL} -k prior",
    ),
    Mutant(
        "the fastest rank says how long steps are",
        "resilient/train/callbacks/save_schedule.py",
        "step_seconds = max(measurements.step_seconds for measurements in shown)",
        "step_seconds = min(measurements.step_seconds for measurements in shown)",
        f"{CADENCE} -k slow",
    ),
    Mutant(
        "the first rank's save decides",
        "resilient/train/callbacks/save_schedule.py",
        "choose_interval(max(costs), mtbf_seconds, bounds)",
        "choose_interval(costs[0], mtbf_seconds, bounds)",
        f"{CADENCE} -k slowest",
    ),
    Mutant(
        "an interval may be no step at all",
        "resilient/train/callbacks/save_schedule.py",
        "steps = max(1, round(seconds / step_seconds))",
        "steps = round(seconds / step_seconds)",
        f"{CADENCE} -k whoever",
    ),
    Mutant(
        "waiting for a save counts as a step",
        "resilient/train/callbacks/save_schedule.py",
        "now_seconds - since[0] - (stalled_seconds - since[1])",
        "now_seconds - since[0]",
        f"{CADENCE} -k waiting",
    ),
    Mutant(
        "the time of an evaluation counts as a step",
        "resilient/train/callbacks/save_schedule.py",
        '        """Leave the time of an evaluation out of the measurements."""\n'
        "        if self._life is not None:\n"
        "            self._life.steps.disturb()\n",
        '        """Leave the time of an evaluation out of the measurements."""\n',
        f"{CADENCE} -k evaluation",
    ),
    Mutant(
        "what was planned first holds for ever",
        "resilient/train/callbacks/save_schedule.py",
        "attempt.due = step, step + 1, None",
        "attempt.due = step, step + 1, step + 10",
        f"{CADENCE} -k slower",
    ),
    Mutant(
        "the launcher's word is not heeded",
        "resilient/train/session.py",
        "        args.save_every = every\n",
        "",
        f"{CADENCE} -k word",
    ),
    Mutant(
        "saves by time come beside those of save_steps",
        "resilient/train/callbacks/base.py",
        "(step % state.save_steps == 0 and not is_planned(args))",
        "step % state.save_steps == 0",
        f"{CADENCE} -k apart",
    ),
    Mutant(
        "preemptions count as failures of a plan",
        "resilient/goodput/save_planning.py",
        'frozenset({"preemption", "resize"})',
        "frozenset()",
        f"{PLAN} -k should_do",
    ),
    Mutant(
        "a notice is held against the save alone",
        "resilient/goodput/save_planning.py",
        "return known.step_seconds + known.saving.p95 + ",
        "return known.saving.p95 + ",
        f"{PLAN} -k should_do",
    ),
    Mutant(
        "what does not fit a notice is no reason for an exit code",
        "cli/resilient_cli/commands/plan.py",
        "return 0 if fits else DOES_NOT_FIT",
        "return 0 if fits or known else DOES_NOT_FIT",
        f"{PLAN} -k should_do",
    ),
    Mutant(
        "a failure that the near tier survives moves the durable tier's interval",
        "resilient/checkpoint/promotion_policy.py",
        "observe(_lives(context.store), HOST_LOSSES)",
        "observe(_lives(context.store))",
        f"{DURABLE} -k survives",
    ),
    Mutant(
        "promotions may take 5 % of the time",
        "resilient/checkpoint/promotion_policy.py",
        ("IntervalBounds(SHARE_MAX, land_seconds=land_seconds)"),
        ("IntervalBounds(land_seconds=land_seconds)"),
        f"{DURABLE} -k moves_it",
    ),
    Mutant(
        "what a promotion takes is not noted",
        "resilient/checkpoint/promotion.py",
        "                self._pace.note(took_seconds)\n",
        "                pass\n",
        f"{DURABLE} -k pays",
    ),
    Mutant(
        "what is planned is not kept to",
        "resilient/checkpoint/promotion.py",
        "self._pace.plan(context) if self._pace else self._tiering",
        "self._tiering",
        f"{DURABLE} -k pays",
    ),
    Mutant(
        "auto plans one tier only",
        "resilient/train/session.py",
        "is_planned = is_auto(args) and every is None and seconds is None",
        "is_planned = False",
        f"{DURABLE} -k promotions_too",
    ),
]
