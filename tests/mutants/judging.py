"""Defects of what the agent concludes from the end of a life, and of what it says of it."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

POLICY = "tests/unit/checkpoint/test_resume_policy.py tests/property/test_resume_situations.py"
DECIDE = "tests/unit/elastic/test_decide.py"
JUDGING = "tests/unit/elastic/test_stop_judging.py"
PROGRESS = "tests/unit/elastic/test_progress.py"
CODES = "tests/process/test_agent_codes.py"
SIGNALS = "tests/process/test_agent_signals.py"
MODULE = "resilient/elastic/restart_policy.py"
WATCH = "resilient/elastic/attempt_monitor.py"

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
        "resilient/distributed/launch_env.py",
        "    if not saves_when_stopped:\n",
        "    if False:\n",
        f"{SIGNALS} -k own_that_sigterm",
    ),
    Mutant(
        "a trainer says that SIGTERM costs it work",
        "resilient/distributed/launch_env.py",
        "    if not saves_when_stopped:\n",
        "    if True:\n",
        "tests/contract/test_comms.py -k loses_work",
    ),
    Mutant(
        "what a worker said in this life is not looked for",
        WATCH,
        "exited_without_save(self._notes) == self._attempt",
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
        "resilient/elastic/restart_policy.py",
        ' if resume != "auto" else "")',
        ' if False else "")',
        DECIDE,
    ),
    Mutant(
        "nobody is warned that a requeue starts over",
        "resilient/elastic/launcher.py",
        '    if wishes.resume != "auto":\n',
        "    if False:\n",
        f"{SIGNALS} -k own_that_sigterm",
    ),
    Mutant(
        "no answer is no progress",
        "resilient/elastic/restart_controller.py",
        ("            return None\n        if self.newest is ProgressState.UNTOLD"),
        ("            return False\n        if self.newest is ProgressState.UNTOLD"),
        f"{PROGRESS} {JUDGING}",
    ),
    Mutant(
        "no answer forgets lives without progress",
        "resilient/elastic/restart_policy.py",
        "attempts if is_silent else ",
        "",
        "tests/unit/elastic/test_history.py",
    ),
    Mutant(
        "a refused checkpoint is tried again",
        "resilient/elastic/restart_policy.py",
        "    if outcome.is_refusal and",
        "    if False and",
        DECIDE,
    ),
    Mutant(
        "a wish is forgotten once a generation of this run began",
        "resilient/checkpoint/resume_policy.py",
        "    if saved:\n",
        "    if ours:\n",
        POLICY,
    ),
    Mutant(
        "a wish holds although this run has saved",
        "resilient/checkpoint/resume_policy.py",
        "    if saved:\n",
        "    if False:\n",
        POLICY,
    ),
    Mutant(
        "a relative reference moves with each attempt",
        "resilient/checkpoint/resume_policy.py",
        "    if pinned and facts.wish != NEVER:\n",
        "    if False:\n",
        POLICY,
    ),
    Mutant(
        "lost checkpoints of this run are passed over",
        "resilient/checkpoint/resume_policy.py",
        "    if lost:\n",
        "    if False:\n",
        POLICY,
    ),
    Mutant(
        "every start in one SLURM job is the same run",
        "resilient/distributed/start_identity.py",
        "not self.job.startswith(_SLURM) or self.requeues > earlier.requeues",
        "True",
        "tests/unit/test_identity.py",
    ),
    Mutant(
        "launches that nobody knows are none",
        "resilient/elastic/restart_controller.py",
        ("return None if found is ProgressState.UNKNOWN else int(found)"),
        ("return 0 if found is ProgressState.UNKNOWN else int(found)"),
        "tests/unit/test_build.py",
    ),
    Mutant(
        "the store is asked after every stop",
        "resilient/elastic/restart_controller.py",
        "        if _needs_answer(outcome):\n",
        "        if True:\n",
        JUDGING,
    ),
    Mutant(
        "a stop waits for a store as long as a failure does",
        "resilient/elastic/restart_controller.py",
        "        if request is None:\n",
        "        if True:\n",
        JUDGING,
    ),
    Mutant(
        "the keeper has time that a stop has not",
        "resilient/elastic/saver_daemon.py",
        "most_seconds if within_seconds is None else max(0.0, within_seconds)",
        "most_seconds",
        "tests/process/test_keeper_left.py",
    ),
    Mutant(
        "an error that ended a worker is not seen at its exit",
        "resilient/elastic/workers/bootstrap.py",
        "    sys.last_type, sys.last_value, sys.last_traceback = "
        "type(error), error, error.__traceback__\n",
        "",
        "tests/process/test_agent_launch.py -k at_the_exit",
    ),
    Mutant(
        "a script that cannot begin is no crash loop where no repository is known",
        "resilient/elastic/restart_controller.py",
        "            return not is_brief\n",
        "            return True\n",
        JUDGING,
    ),
    Mutant(
        "a long life got nowhere because no repository is known",
        "resilient/elastic/restart_controller.py",
        "not outcome.has_stepped and now_seconds - self._last_seconds < _BRIEF_SECONDS",
        "not outcome.has_stepped",
        JUDGING,
    ),
    Mutant(
        "who tells of a lost connection is to blame for it",
        "resilient/elastic/outcome.py",
        " or bool(_PEER_GONE.search(message))",
        "",
        "tests/unit/elastic/test_failures.py -k lost_the_connection",
    ),
    Mutant(
        "any connection that is reset was one to a peer",
        "resilient/elastic/outcome.py",
        r'r"gloo/transport/.*(Read',
        r'r"(Read',
        "tests/unit/elastic/test_causes.py",
    ),
    Mutant(
        "who tells of a failure leaves no time to see it",
        WATCH,
        "        _wait_for_origin(self._group, self._clock)\n",
        "",
        "tests/process/test_echoes.py -k given_the_time",
    ),
    Mutant(
        "a host that lost another one has failed",
        WATCH,
        "self._nodes > 1 and first.is_mere_echo",
        "False",
        "tests/unit/elastic/test_ends_beside_a_hang.py -k only_lost",
    ),
    Mutant(
        "lives that only lose others go on for ever",
        "resilient/elastic/restart_policy.py",
        "attempts = self.no_progress_lives + (progressed is False)",
        "attempts = 0",
        "tests/unit/elastic/test_history.py -k only_lose_others",
    ),
    Mutant(
        "losses of which nothing tells the progress go on for ever",
        MODULE,
        "    if budget.losses_left <= 0:\n",
        "    if False:\n",
        "tests/unit/elastic/test_history.py -k nothing_tells",
    ),
    Mutant(
        "a host that is known to be gone does not explain a loss",
        "resilient/elastic/restart_controller.py",
        "self._history, self._before_loss = self._before_loss, None",
        "pass",
        f"{JUDGING} -k known_to_be_gone",
    ),
    Mutant(
        "hosts that go for ever excuse a run that gets nowhere",
        "resilient/elastic/restart_controller.py",
        " and self._excused < _EXCUSED_MAX",
        "",
        f"{JUDGING} -k go_for_ever",
    ),
    Mutant(
        "losses without progress are not counted where no crash loop is wanted",
        "resilient/elastic/restart_policy.py",
        "losses=(*self.losses, at_seconds), no_progress_lives=attempts",
        "no_progress_lives=attempts",
        "tests/unit/elastic/test_history.py -k no_crash_loop_is_wanted",
    ),
    Mutant(
        "a broken device is hidden by the connections that it takes along",
        "resilient/elastic/outcome.py",
        "(is_echo(code, message) and not seen.gpu_faults)",
        "is_echo(code, message)",
        "tests/unit/elastic/test_causes.py",
    ),
]
