"""Defects of what the agent concludes from the end of a life, and of what it says of it."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DECIDE = "tests/unit/agent/test_decide.py"
JUDGING = "tests/unit/agent/test_judging.py"
PROGRESS = "tests/unit/agent/test_progress.py"
CODES = "tests/process/test_agent_codes.py"
SIGNALS = "tests/process/test_agent_signals.py"
MODULE = "resilient/agent/verdict/decide.py"
WATCH = "resilient/agent/watch.py"

MUTANTS = [
    Mutant(
        "work that SIGTERM cost is taken for saved",
        MODULE,
        "    if not outcome.is_unsaved:\n",
        "    if True:\n",
        DECIDE,
    ),
    Mutant(
        "a loop of one's own does not say that it loses work",
        "resilient/world/launch.py",
        "    if not saves_when_stopped:\n",
        "    if False:\n",
        f"{SIGNALS} -k own_that_sigterm",
    ),
    Mutant(
        "a trainer says that SIGTERM costs it work",
        "resilient/world/launch.py",
        "    if not saves_when_stopped:\n",
        "    if True:\n",
        "tests/contract/test_comms.py -k loses_work",
    ),
    Mutant(
        "what a worker said in this life is not looked for",
        WATCH,
        "told_unsaved(self._notes) == self._attempt",
        "False",
        f"{SIGNALS} -k own_that_sigterm",
    ),
    Mutant(
        "a rank that SIGTERM killed outvotes one that saved",
        WATCH,
        "{CODE_PREEMPTED}, {-signal.SIGTERM})",
        "{-signal.SIGTERM}, {CODE_PREEMPTED})",
        f"{SIGNALS} -k rank_that_saved",
    ),
    Mutant(
        "the first 75 hides a failure",
        WATCH,
        "        failed = self._has_failed()\n",
        "        failed = False\n",
        f"{CODES} -k hides_no_failure",
    ),
    Mutant(
        "a rank that was killed after the first 75 had agreed to leave",
        WATCH,
        "        if not is_ended:\n",
        "        if False:\n",
        f"{CODES} -k stays_after",
    ),
    Mutant(
        "the same command resumes whatever it says",
        "resilient/agent/verdict/naming.py",
        ' if resume != "auto" else "")',
        ' if False else "")',
        DECIDE,
    ),
    Mutant(
        "nobody is warned that a requeue starts over",
        "resilient/build.py",
        '    if wishes.resume != "auto":\n',
        "    if False:\n",
        f"{SIGNALS} -k own_that_sigterm",
    ),
    Mutant(
        "no answer is no progress",
        "resilient/agent/verdict/progress.py",
        "            return None\n        is_untold",
        "            return False\n        is_untold",
        f"{PROGRESS} {JUDGING}",
    ),
    Mutant(
        "no answer forgets lives without progress",
        "resilient/agent/verdict/history.py",
        "lives if is_silent else ",
        "",
        "tests/unit/agent/test_history.py",
    ),
    Mutant(
        "a wish holds although newer work may be there",
        "resilient/agent/verdict/progress.py",
        "is_known = self.is_answered and not",
        "is_known = not",
        PROGRESS,
    ),
    Mutant(
        "launches that nobody knows are none",
        "resilient/agent/verdict/asking.py",
        "return None if found is Progress.UNKNOWN else int(found)",
        "return 0 if found is Progress.UNKNOWN else int(found)",
        "tests/unit/test_build.py",
    ),
    Mutant(
        "the store is asked after every stop",
        "resilient/agent/judging.py",
        "        if _needs_answer(outcome):\n",
        "        if True:\n",
        JUDGING,
    ),
    Mutant(
        "a stop waits for a store as long as a failure does",
        "resilient/agent/judging.py",
        "        if request is None:\n",
        "        if True:\n",
        JUDGING,
    ),
    Mutant(
        "the keeper has time that a stop has not",
        "resilient/agent/keeper/keeping.py",
        "most_seconds if within_seconds is None else max(0.0, within_seconds)",
        "most_seconds",
        "tests/process/test_keeper_left.py",
    ),
    Mutant(
        "an error that ended a worker is not seen at its exit",
        "resilient/agent/workers/bootstrap.py",
        "    sys.last_type, sys.last_value, sys.last_traceback = "
        "type(error), error, error.__traceback__\n",
        "",
        "tests/process/test_agent_launch.py -k at_the_exit",
    ),
]
