"""Defects of the account of a run's time."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ACCOUNT = "tests/unit/goodput/test_account.py"
PAGE = "tests/cli/test_report.py"

STEADY = "tests/unit/goodput/test_steadying.py"
REPORT = "tests/cli/test_report.py"

MUTANTS = [
    Mutant(
        "a rank that waited for a host is to blame for its loss",
        "resilient/goodput/timeline.py",
        "return lost_peer or own",
        "return own",
        ACCOUNT,
    ),
    Mutant(
        "a host that is gone takes the blame of a rank that failed by itself",
        "resilient/goodput/timeline.py",
        '_who_is_gone(attempt) if first.text("cause") == _ECHO else None',
        "_who_is_gone(attempt)",
        ACCOUNT,
    ),
    Mutant(
        "the loss of a host is a resize",
        "resilient/goodput/timeline.py",
        "_who_is_gone(attempt) if kind in _WITHOUT_A_WORD else None",
        "None",
        ACCOUNT,
    ),
    Mutant(
        "a clock that jumps bends the account",
        "resilient/goodput/report.py",
        ("by_time = correct_clock_steps(told)"),
        "by_time = sorted(told, key=lambda one: one.at_ms)",
        STEADY,
    ),
    Mutant(
        "a launcher is told by the time of day",
        "resilient/goodput/event_log.py",
        ("return correct_clock_steps(found)"),
        "return sorted(found, key=lambda one: one.at_ms)",
        STEADY,
    ),
    Mutant(
        "the first record says which day it is",
        "resilient/goodput/event_log.py",
        "statistics.median_low(offsets)",
        "max(offsets)",
        STEADY,
    ),
    Mutant(
        "the seconds of all machines are one another's",
        "resilient/goodput/event_log.py",
        'found[record.text("boot")].append',
        'found["record"].append',
        STEADY,
    ),
    Mutant(
        "the present is what a clock says that was set",
        "resilient/goodput/event_log.py",
        "return now_ms if offset_ms is None else",
        "return now_ms if True else",
        STEADY,
    ),
    Mutant(
        "an event does not say the monotonic time",
        "resilient/events.py",
        '            "monotonic": round(self.clock.monotonic_seconds(), 3),\n',
        "",
        "tests/unit/test_events.py",
    ),
    Mutant(
        "a loss that no float can hold ends the account",
        "resilient/goodput/report.py",
        "    except OverflowError:  # JSON integers are unbounded\n        return None\n",
        "    finally:\n        pass\n",
        "tests/unit/goodput/test_account.py -k passed_over",
    ),
    Mutant(
        "what a failure took to end counts as training",
        "resilient/goodput/attempts.py",
        '*(record.at_ms - record.milliseconds("stop_seconds") for record in failed)',
        "*(record.at_ms for record in failed)",
        f"{ACCOUNT} -k known_run",
    ),
    Mutant(
        "a hang is known from its first moment",
        "resilient/goodput/attempts.py",
        'return hang.at_ms - hang.milliseconds("waited_seconds") if hang else None',
        "return hang.at_ms if hang else None",
        f"{ACCOUNT} -k hang",
    ),
    Mutant(
        "training that was done in vain counts as useful",
        "resilient/goodput/report.py",
        "    paint_lost(line, faults)\n",
        "    _ = paint_lost\n",
        f"{ACCOUNT} -k known_run",
    ),
    Mutant(
        "a rollback loses the work of one life only",
        "resilient/goodput/timeline.py",
        "        useful.pop()\n",
        "        break\n",
        f"{ACCOUNT} -k rollback",
    ),
    Mutant(
        "a piece that is cut takes the class of the first",
        "resilient/goodput/timeline.py",
        "self._colours.insert(nth, self._colours[nth - 1])",
        "self._colours.insert(nth, self._colours[0])",
        f"{ACCOUNT} -k known_run",
    ),
    Mutant(
        "the end of the wall clock is left out",
        "resilient/goodput/timeline.py",
        "pairwise([*self._cuts, self._ended_ms]), self._colours, strict=True",
        "pairwise(self._cuts), self._colours, strict=False",
        f"{ACCOUNT} -k whatever",
    ),
    Mutant(
        "clocks are believed",
        "resilient/goodput/event_log.py",
        "median if abs(median) > TOLERANCE_MS else 0",
        "median if abs(median) > 1 << 60 else 0",
        f"{ACCOUNT} -k clock",
    ),
    Mutant(
        "what a life gave up by itself counts as useful",
        "resilient/goodput/attempts.py",
        "        if record.event == WENT_BACK:\n",
        "        if record.event == WENT_BACK and not points:\n",
        f"{ACCOUNT} -k went_back",
    ),
    Mutant(
        "half a line is an error",
        "resilient/goodput/event_log.py",
        "    except (ValueError, RecursionError):\n",
        "    except RecursionError:\n",
        f"{ACCOUNT} -k half",
    ),
    Mutant(
        "a page shows what others wrote as it is",
        "cli/resilient_cli/page/page.py",
        "text(one.detail or NONE)",
        "(one.detail or NONE)",
        f"{PAGE} -k no_part_of_the_page",
    ),
    Mutant(
        "the page calls what nothing resumes from whole",
        "cli/resilient_cli/page/checkpoints.py",
        "{found.state(survey)}</span>",
        "{survey.state}</span>",
        PAGE,
    ),
    Mutant(
        "a checkpoint that is damaged makes no new page",
        "cli/resilient_cli/commands/ui.py",
        '"checkpoint-*/*", ',
        "",
        PAGE,
    ),
    Mutant(
        "a run whose launcher is dead goes on training for a minute",
        "resilient/goodput/report.py",
        "    if goes_on and until_ms",
        "    if until_ms",
        f"{REPORT} -k dead",
    ),
    Mutant(
        "a run whose launcher is dead is called training",
        "cli/resilient_cli/commands/report.py",
        "    if is_dead:\n",
        "    if False:\n",
        f"{REPORT} -k dead",
    ),
]
