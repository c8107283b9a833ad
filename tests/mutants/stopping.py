"""Defects of what becomes of a stop: killed ranks, the first moments, lives ended from outside."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DECIDE = "tests/unit/elastic/test_decide.py"
HISTORY = "tests/unit/elastic/test_history.py"
JUDGING = "tests/unit/elastic/test_stop_judging.py"
STOPS = "tests/unit/elastic/test_stops.py"
EARLY = "tests/cli/test_early.py"
KILLED = "tests/process/test_killed_while_stopping.py"
CAUSES = "tests/process/test_causes_told.py"
STARTING = "tests/process/test_stop_at_startup.py"
TABLE = "resilient/elastic/restart_policy.py"
OUTCOME = "resilient/elastic/outcome.py"
WATCH = "resilient/elastic/attempt_monitor.py"
BOOKS = "resilient/elastic/restart_controller.py"
FOLDERS = "tests/process/test_folders_left.py"

MUTANTS = [
    Mutant(
        "a rank that was killed for memory was taken from outside",
        OUTCOME,
        "self.status == -signal.SIGKILL and self.cause is Cause.SIGNAL",
        "self.status == -signal.SIGKILL",
        DECIDE,
    ),
    Mutant(
        "a taken rank is 75 although nothing is known to be committed",
        TABLE,
        '    if outcome.newest:\n        why = f"{what}: at most the work since',
        '    if True:\n        why = f"{what}: at most the work since',
        DECIDE,
    ),
    Mutant(
        "a stop with a taken rank is no interruption",
        OUTCOME,
        "return self.is_taken or is_asked",
        "return is_asked",
        DECIDE,
    ),
    Mutant(
        "what was seen beside a kill is not looked at while stopping",
        WATCH,
        "find_failures(self._group.exits, math.inf, self._health.evidence())",
        "find_failures(self._group.exits, math.inf)",
        f"{CAUSES} -k tells_a_kill",
    ),
    Mutant(
        "who waits for a dead rank makes the stop one that was too slow",
        WATCH,
        "outcome if is_ended or outcome.is_taken else",
        "outcome if is_ended else",
        f"{KILLED} -k waits",
    ),
    Mutant(
        "who waits for a dead rank waits until the deadline",
        WATCH,
        "left_seconds -= min(_LAST_SECONDS, _LAST_SHARE * self._patience.grace_seconds)",
        "pass",
        f"{KILLED} -k waits",
    ),
    Mutant(
        "a rank that is killed beside one that leaves preempted is a failure",
        WATCH,
        "self._failed(math.inf).in_a_stop() if failed",
        "self._failed(math.inf) if failed",
        f"{KILLED} -k beside_one",
    ),
    Mutant(
        "a run that a kill ends does not hear the notice that comes right after",
        BOOKS,
        "        stops.wait(_NEWS_SECONDS)\n",
        "",
        f"{KILLED} -k after_the_kill",
    ),
    Mutant(
        "a rank that cannot be killed is one that hangs",
        "resilient/elastic/attempt_monitor.py",
        "is_host_broken=is_unkillable",
        "is_host_broken=False",
        "tests/process/test_uninterruptible.py -k makes_the_agent_leave",
    ),
    Mutant(
        "a restart waits for news",
        BOOKS,
        "not outcome.is_taken or self.restarts_left > 0:",
        "not outcome.is_taken:",
        JUDGING,
    ),
    Mutant(
        "what was committed once is forgotten while nobody answers",
        BOOKS,
        'self._progress.name_of_last if outcome.is_taken and newest == "" else newest',
        "newest",
        JUDGING,
    ),
    Mutant(
        "the answer that decides the code gets no more time than another",
        BOOKS,
        "_DECIDING_SHARE if outcome.is_taken else _STOPPING_SHARE",
        "_STOPPING_SHARE",
        JUDGING,
    ),
    Mutant(
        "a life that was ended from outside counts against the script",
        "resilient/elastic/restart_policy.py",
        " or (outcome.is_robbed and not progressed)",
        "",
        HISTORY,
    ),
    Mutant(
        "a life that was ended from outside before any step is no crash loop",
        OUTCOME,
        "self.is_taken and self.has_stepped",
        "self.is_taken",
        HISTORY,
    ),
    Mutant(
        "no number of lives without progress is allowed",
        TABLE,
        "0 < budget.no_progress_lives_max <= budget.no_progress_lives",
        "budget.no_progress_lives_max <= budget.no_progress_lives",
        HISTORY,
    ),
    Mutant(
        "signals of the first moments are forgotten",
        "resilient/elastic/signals.py",
        "            self._heard(early, None)\n",
        "            pass\n",
        STOPS,
    ),
    Mutant(
        "nobody listens in the first moments",
        "cli/resilient_cli/__main__.py",
        "        process_exit.record_early_signals(sys.argv[1:])\n",
        "",
        f"{STARTING} -k program_itself",
    ),
    Mutant(
        "the program is imported before anybody listens",
        "cli/resilient_cli/__main__.py",
        "        from resilient_cli import process_exit\n",
        "        from resilient_cli import app, process_exit\n",
        f"{STARTING} -k program_itself",
    ),
    Mutant(
        "a plan that is printed cannot be ended",
        "cli/resilient_cli/commands/train.py",
        "    process_exit.stop_listening()\n    answer",
        "    answer",
        f"{STARTING} -k printed",
    ),
    Mutant(
        "the value of a global option is taken for the command",
        "cli/resilient_cli/process_exit.py",
        "not is_value and not word",
        "not word",
        EARLY,
    ),
    Mutant(
        "what was heard is kept from who listened before",
        "cli/resilient_cli/process_exit.py",
        "        signal.raise_signal(number)\n",
        "        pass\n",
        EARLY,
    ),
    Mutant(
        "the folder of a killed agent is left for ever",
        "resilient/elastic/run_dir.py",
        "        if _is_own(path):\n",
        "        if False:\n",
        FOLDERS,
    ),
    Mutant(
        "the folder of a living agent is removed",
        "resilient/elastic/run_dir.py",
        "    lock = lock_folder(path)\n",
        "    lock = os.open(path, os.O_RDONLY)\n",
        FOLDERS,
    ),
    Mutant(
        "the folder of an agent that begins is removed",
        "resilient/elastic/run_dir.py",
        " and (path / _MARK).exists()",
        "",
        FOLDERS,
    ),
    Mutant(
        "who loses others while stopping says that trying again is no use",
        TABLE,
        "    if outcome.is_deserted:\n",
        "    if False:\n",
        DECIDE,
    ),
]
