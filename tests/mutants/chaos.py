"""Defects of chaos runs: faults that differ, and promises that are kept whatever happens."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PLANS = "tests/unit/testing/test_chaos_plans.py"
PROMISES = "tests/unit/testing/test_chaos_promises.py"
STRIKES = "tests/unit/testing/test_chaos_strikes.py"
FOLDER = "resilient/testing/chaos"
CLOCK = "tests/unit/testing/test_chaos_clock.py"
BREAKS = f"{PROMISES} -k each_promise"

HOSTS = "tests/unit/testing/test_chaos_on_hosts.py"
NAMESPACES = "tests/process/test_namespaces.py"
ORDERS = "tests/unit/testing/test_chaos_orders.py"
ENDED = "tests/process/test_chaos_ended.py"

MUTANTS = [
    Mutant(
        "an order ends a rehearsal and nothing else",
        "cli/resilient_cli/commands/chaos.py",
        "with obeying_orders():",
        ("with __import__('contextlib').suppress(Terminated):"),
        f"{ENDED} -k along",
    ),
    Mutant(
        "a second order disturbs the way out",
        f"{FOLDER}/runner.py",
        "            signal.signal(item, lambda *_: None)\n",
        "            signal.signal(item, obey)\n",
        ORDERS,
    ),
    Mutant(
        "a process of which nobody knows yet goes on",
        f"{FOLDER}/runner.py",
        "            kill_all(pid)\n",
        "            pass\n",
        ORDERS,
    ),
    Mutant(
        "a disk stays mounted",
        f"{FOLDER}/runner.py",
        "            unmount(disk)\n",
        "            pass\n",
        f"{ENDED} -k mounted",
    ),
    Mutant(
        "whoever waits until a time of day waits for the moved one",
        f"{FOLDER}/clock.c",
        "if (moved && time.tv_sec > EPOCH) add(&time, -*moved);",
        "if (0) add(&time, -*moved);",
        f"{CLOCK} -k forward_and_back",
    ),
    Mutant(
        "a clock moves from where it was at first",
        f"{FOLDER}/clock_shift.py",
        "self.moved_seconds += seconds",
        "self.moved_seconds = seconds",
        f"{CLOCK} -k forward_and_back",
    ),
    Mutant(
        "nobody looks whether a clock moves",
        f"{FOLDER}/clock_shift.py",
        "    if abs(moved_seconds - _PROBE_SECONDS) < _PROBE_SLACK_SECONDS:\n",
        "    if not answer.returncode:\n",
        f"{CLOCK} -k found_out",
    ),
    Mutant(
        "the job is started with everybody's clock",
        f"{FOLDER}/job.py",
        "environ = self.hands.environ if self.hands else {}",
        "environ = {}",
        "tests/process/test_chaos.py -k clock_jumps",
    ),
    Mutant(
        "another seed strikes the same",
        f"{FOLDER}/plan.py",
        'Random(f"{seed}/{number}/{nth}")',
        'Random(f"{number}/{nth}")',
        f"{PLANS} -k same_seed",
    ),
    Mutant(
        "all strikes of an entry come at one place",
        f"{FOLDER}/plan.py",
        'Random(f"{seed}/{number}/{nth}")',
        'Random(f"{seed}/{number}")',
        f"{PLANS} -k order_of_the_run",
    ),
    Mutant(
        "a fault that cannot be had is left out in silence",
        f"{FOLDER}/capabilities.py",
        "if why and plan.has(FaultKind(kind))}",
        "if not why and plan.has(FaultKind(kind))}",
        f"{PLANS} -k refused_with_all_reasons",
    ),
    Mutant(
        "a word of a plan that nobody knows is passed over",
        f"{FOLDER}/plan.py",
        "        if name not in names:\n",
        "        if not name:\n",
        f"{PLANS} -k no_plan_can_say",
    ),
    Mutant(
        "a different end is the same",
        f"{FOLDER}/verdict.py",
        '_judged("exact", text, ended.differences, is_tested',
        '_judged("exact", text, (), is_tested',
        f"{PROMISES} -k end_is_judged",
    ),
    Mutant(
        "what was committed may be lost",
        f"{FOLDER}/verdict.py",
        ("if result.after is None or result.before is None or result.after < result.before"),
        "if result.before is None",
        BREAKS,
    ),
    Mutant(
        "any exit code is right",
        f"{FOLDER}/verdict.py",
        "    is_wrong = result.code is not None and result.code not in result.codes\n",
        "    is_wrong = result.code is not None and not result.codes\n",
        BREAKS,
    ),
    Mutant(
        "damage need not be found",
        f"{FOLDER}/verdict.py",
        "for result in tested if not result.is_found]",
        "for result in tested if not result.what]",
        BREAKS,
    ),
    Mutant(
        "a stop may lose work",
        f"{FOLDER}/verdict.py",
        "    if struck.code == _STOPPED:\n        return 0\n",
        "",
        BREAKS,
    ),
    Mutant(
        "orphans may train on",
        f"{FOLDER}/verdict.py",
        ("for result in tested\n        if result.orphans\n    ]"),
        "for result in tested if not result.what]",
        BREAKS,
    ),
    Mutant(
        "a fault that did not strike proves something",
        f"{FOLDER}/verdict.py",
        "    return not evidence.missed and all(",
        "    return all(",
        f"{PROMISES} -k did_not_strike",
    ),
    Mutant(
        "two bits are flipped",
        f"{FOLDER}/injectors.py",
        "file.read(1)[0] ^ 1 << bit % 8",
        "file.read(1)[0] ^ 3 << bit % 7",
        f"{STRIKES} -k one_bit",
    ),
    Mutant(
        "whatever lies in the folder is removed",
        f"{FOLDER}/runner.py",
        "    for name in sorted(names - {CALM, STRUCK}):\n",
        "    for name in sorted(names & {CALM, STRUCK} - names):\n",
        f"{STRIKES} -k anything_else",
    ),
    Mutant(
        "any code is right of any host",
        f"{FOLDER}/verdict.py",
        "return self.code in (0, *self.codes)",
        "return True",
        f"{HOSTS} -k its_own_code",
    ),
    Mutant(
        "whoever meets at a lost host has to go on",
        f"{FOLDER}/verdict.py",
        "others = (UNREACHABLE,) if struck == MEETING_HOST else ()",
        "others = ()",
        f"{HOSTS} -k for_whom",
    ),
    Mutant(
        "hosts may leave because another one is cut off",
        f"{FOLDER}/verdict.py",
        "others = (UNREACHABLE,) if struck == MEETING_HOST else ()",
        "others = (UNREACHABLE,)",
        f"{HOSTS} -k for_whom",
    ),
    Mutant(
        "bits are demanded of any number of ranks",
        f"{FOLDER}/verdict.py",
        "return is_same_world(calm, ended) or (calm.is_canonical and ended.is_canonical)",
        "return True",
        f"{HOSTS} -k only_where",
    ),
    Mutant(
        "a life is held against what others saved after it",
        f"{FOLDER}/verdict.py",
        "        for due in (result.due or result.after,)\n",
        "        for due in (result.after,)\n",
        f"{HOSTS} -k what_there_was_then",
    ),
    Mutant(
        "a life has to begin from what was damaged",
        f"{FOLDER}/runner.py",
        "struck.after if struck.damaged else struck.before",
        "struck.before",
        f"{HOSTS} -k damaged",
    ),
    Mutant(
        "of the lives after a fault only the first is judged",
        f"{FOLDER}/runner.py",
        "    restored, due = next(wrong, starts[0])\n",
        "    restored, due = starts[0]\n",
        f"{HOSTS} -k too_little",
    ),
    Mutant(
        "hosts are started again when the run is over",
        f"{FOLDER}/job.py",
        "        if 0 in codes:\n",
        "        if 1000 in codes:\n",
        f"{HOSTS} -k while_the_run_lasts",
    ),
    Mutant(
        "a host that ends the same way again is started again",
        f"{FOLDER}/job.py",
        "if code is not None and code not in PERMANENT:",
        "if code is not None:",
        f"{HOSTS} -k while_the_run_lasts",
    ),
    Mutant(
        "what was told on a second host is not heard",
        f"{FOLDER}/job.py",
        '[folder / "rank-0.jsonl" for folder in folders]',
        '[folder / "rank-0.jsonl" for folder in folders[:1]]',
        f"{HOSTS} -k heard_in_order",
    ),
    Mutant(
        "a host has what belongs to another one",
        f"{FOLDER}/netns.py",
        "if pid not in holders and _number_of(pid) in numbers]",
        "if pid not in holders and _number_of(pid)]",
        f"{NAMESPACES} -k whoever",
    ),
    Mutant(
        "a cut host is reached",
        f"{FOLDER}/netns.py",
        'self.switch.run("ip", "link", "set", link_of(number), "down")',
        "pass",
        f"{NAMESPACES} -k cut_off",
    ),
]
