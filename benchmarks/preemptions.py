"""Preemptions at random moments of one run, with checks of saved step, deadline and exit code.

Each attempt of one run of two ranks is asked to stop: by SIGTERM, SIGUSR1 or a notice in a file.
The request comes in a random phase (start-up, loading, forward, backward, evaluation, saving),
shortly after a rank has entered it. A preemption counts as `kept` if the agent exits with 75 before
the deadline, and the ranks finished the same step. That step must be the newest checkpoint and must
verify, and the next attempt must continue from there. ``SEED`` in the environment changes the
random choices.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Report
from benchmarks.peers.preempted import PHASES
from resilient.elastic.restart_controller import newest_committed
from resilient.errors import Preempted
from resilient.format.keys import CheckpointId
from resilient.storage.open import open_store
from resilient.testing.run_equality import ending

ROUNDS = 12
WORKER = Path(__file__).parent / "peers" / "preempted.py"
RANKS = 2
GRACE_SECONDS = 20.0
_WAIT_SECONDS = 180.0
_WAYS = ("SIGTERM", "SIGUSR1", "file")


@dataclass(frozen=True)
class Blow:
    """One preemption: kind of request, phase, and delay after the start of the phase."""

    way: str
    phase: str
    after_seconds: float


@dataclass(frozen=True)
class Outcome:
    """Result of one preemption; ``problem`` is empty if every promise was kept."""

    blow: Blow
    took_seconds: float
    problem: str
    step: int


def draw(number: int, seed: int) -> Blow:
    """Return the preemption with this number; all phases are equally frequent."""
    draws = random.Random(f"{seed}/{number}")  # noqa: S311 - repeatable
    phase = PHASES[number % len(PHASES)]
    after_seconds = draws.uniform(0, 4) if phase == "start-up" else draws.uniform(0, 0.08)
    return Blow(draws.choice(_WAYS), phase, after_seconds)


class Life:
    """One start of ``resilient train`` in the folder of the run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._notice = folder / "notice"
        self._notice.unlink(missing_ok=True)
        for path in (*folder.glob("phase-*"), *folder.glob("steps-*")):
            path.unlink()
        command = [sys.executable, "-m", "resilient_cli", "train", "--nproc-per-node", str(RANKS)]
        command += ["--grace", str(GRACE_SECONDS), "--notice", f"file:{self._notice}"]
        self.said = folder / "said.txt"
        with self.said.open("a") as output:
            self.agent = subprocess.Popen(
                [*command, str(WORKER), str(folder)],
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def phase(self) -> str:
        """Return the current phase of rank 1."""
        path = self._folder / "phase-1"
        return path.read_text().strip() if path.exists() else ""

    def steps(self) -> list[int]:
        """Return the last step that each rank has finished in this attempt; 0 for none."""
        paths = [self._folder / f"steps-{rank}" for rank in range(RANKS)]
        lines = [path.read_text().split() if path.exists() else [] for path in paths]
        return [int(line[-1]) if line else 0 for line in lines]

    def first_step(self) -> int:
        """Return the first step that this attempt has finished; 0 for none."""
        path = self._folder / "steps-0"
        lines = path.read_text().split() if path.exists() else []
        return int(lines[0]) if lines else 0

    def wait_for(self, phase: str) -> None:
        """Wait until rank 1 is in the phase; except at start-up, after a step of each rank."""
        until = time.monotonic() + _WAIT_SECONDS
        while phase != self.phase() or (phase != "start-up" and not min(self.steps())):
            assert time.monotonic() < until, f"no `{phase}`: {self.said.read_text()[-2000:]}"
            assert self.agent.poll() is None, self.said.read_text()[-2000:]
            time.sleep(0.001)

    def strike(self, way: str) -> float:
        """Request the stop; return its time on the monotonic clock."""
        if way == "file":
            draft = self._folder / "notice-draft"
            draft.write_text(f'{{"reason": "the machine goes", "seconds": {GRACE_SECONDS}}}')
            draft.replace(self._notice)
        else:
            self.agent.send_signal(signal.Signals[way])
        return time.monotonic()

    def end(self) -> None:
        """Kill the agent if it still runs."""
        if self.agent.poll() is None:
            self.agent.kill()
            self.agent.wait()


def preempt(folder: Path, blow: Blow, before: int) -> Outcome:
    """Start an attempt, preempt it, and compare the result with the promises.

    Args:
        folder: Folder of the run.
        blow: The preemption.
        before: Step of the newest checkpoint before this attempt.
    """
    attempt = Life(folder)
    try:
        attempt.wait_for(blow.phase)
        time.sleep(blow.after_seconds)
        struck_at = attempt.strike(blow.way)
        try:
            code = attempt.agent.wait(_WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            code = -1
        took_seconds = time.monotonic() - struck_at
    finally:
        attempt.end()
    return Outcome(
        blow, took_seconds, judge(folder, attempt, code, took_seconds, before), newest(folder)
    )


def judge(folder: Path, attempt: Life, code: int, took_seconds: float, before: int) -> str:
    """Return the promises that were broken; empty if all were kept."""
    steps, first, saved = attempt.steps(), attempt.first_step(), newest(folder)
    agreed = max(*steps, before)
    problems = {
        f"exit {code}": code != Preempted.exit_code,
        f"{took_seconds:.1f} s": took_seconds > GRACE_SECONDS,
        f"ranks finished {steps}": len(set(steps)) > 1,
        f"went on with step {first} after {before}": first not in (0, before + 1),
        f"step {agreed} was agreed, {saved} is saved": saved != agreed,
    }
    if saved:
        # `ending` verifies every byte, and raises an error for damage.
        assert ending(open_store(str(folder)))["step"] == saved
    return ", ".join(text for text, is_so in problems.items() if is_so)


def newest(folder: Path) -> int:
    """Return the step of the newest checkpoint; 0 if there is none."""
    found = newest_committed(str(folder))
    return found.step if isinstance(found, CheckpointId) else 0


def preempt_all(folder: Path, rounds: int, seed: int) -> list[Outcome]:
    """Preempt one run ``rounds`` times, one attempt after the other."""
    outcomes: list[Outcome] = []
    for number in range(rounds):
        before = outcomes[-1].step if outcomes else 0
        outcome = preempt(folder, draw(number, seed), before)
        outcomes.append(outcome)
        blow = outcome.blow
        line = f"{number + 1:4} {blow.phase:10} {blow.way:8} step {outcome.step:5} "
        print(f"{line} {outcome.took_seconds:6.2f} s  {outcome.problem or 'kept'}", file=sys.stderr)
    return outcomes


def run(rounds: int) -> Report:
    """Preempt a run ``rounds`` times, and count the preemptions without a problem."""
    with tempfile.TemporaryDirectory(prefix="preemptions-") as folder:
        outcomes = preempt_all(Path(folder), rounds, int(os.environ.get("SEED", "1")))
    took = sorted(outcome.took_seconds for outcome in outcomes)
    figures: dict[str, float] = {
        "preemptions": len(outcomes),
        "kept": sum(not outcome.problem for outcome in outcomes),
        "seconds_median": round(took[len(took) // 2], 2),
        "seconds_max": round(took[-1], 2),
        "deadline_seconds": GRACE_SECONDS,
    }
    for phase in PHASES:
        of_phase = [outcome for outcome in outcomes if outcome.blow.phase == phase]
        if of_phase:
            figures[f"kept in {phase}"] = sum(not outcome.problem for outcome in of_phase)
            figures[f"of {phase}"] = len(of_phase)
    return Report("preemptions", {}, figures)
