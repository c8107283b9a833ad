"""Progress heartbeats and phases of a rank, and the heartbeat of a user's own training loop.

A heartbeat is a few memory writes into a mapped file that the rank shares with the agent of its
host. The agent manages and monitors the ranks. A heartbeat costs about a microsecond and needs no
network. The agent can read a heartbeat even if the rank or a collective hangs. The times in a
heartbeat are from the monotonic clock, which all processes of a host share.

The file has two slots for the progress, written in turn. A slot begins and ends with its sequence
number, so a reader rejects a half-written slot and reads the other slot. If a rank is stopped or
killed during a write, the previous progress therefore remains.

A second file receives the stacks of all threads when the agent sends :data:`STACKS_SIGNAL`. The
signal handler is the C handler of ``faulthandler``. This handler writes the stacks even if the rank
is stuck inside a collective or has the interpreter lock.

A phase is the activity of a rank, such as a step or a save, and has its own deadline. A step in
which torch's compiler runs may take minutes. Such a step is a phase of its own.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.clock import SystemClock
from resilient.distributed.launch_env import read_launch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.clock import Clock

STACKS_SIGNAL = signal.SIGRTMIN + 10
"""Requests the stacks of a worker's threads; no other code uses this signal."""

RECENT_STEPS = 64

# Sequence number, last finished step, phase, start of the phase, timed steps, sequence number.
_HEAD = struct.Struct("<QqQdQQ")
_NUMBER = struct.Struct("<d")
_EMPTY = (0,) * 6
_WRITE_HEAD = _HEAD.pack_into
_READS_MAX = 5


class Phase(IntEnum):
    """Activity of a rank, which determines its deadline."""

    OUTSIDE = 0
    """Before or after training: the duration is unknown."""
    FIRST = 1
    """Restoring, and the first step: compilers run, loaders start."""
    STEP = 2
    BETWEEN = 3
    """Callbacks, logs and other work between two steps."""
    LOADING = 4
    """Waiting for a batch."""
    EVALUATING = 5
    SAVING = 6
    COMPILING = 7


_LONGEST_AT = 2 * _HEAD.size
_RECENT_AT = _LONGEST_AT + len(Phase) * _NUMBER.size
_OWN_AT = _RECENT_AT + RECENT_STEPS * _NUMBER.size
_SIZE = _OWN_AT + RECENT_STEPS * _NUMBER.size


@dataclass(frozen=True, slots=True)
class ProgressRecord:
    """Last published progress of a rank.

    Attributes:
        step: Last optimizer step that the rank finished; -1 before the first.
        phase: Current activity.
        since_seconds: Start of the activity, on the monotonic clock.
        longest_seconds: Longest duration of each phase so far, by phase.
        step_seconds: Durations of recent steps, without waits for data, saves and similar.
        own_seconds: Time of each step before it first needed other ranks; empty if unknown.
    """

    step: int
    phase: Phase
    since_seconds: float
    longest_seconds: tuple[float, ...]
    step_seconds: tuple[float, ...]
    own_seconds: tuple[float, ...] = ()

    @property
    def has_trained(self) -> bool:
        """True if the rank was in training, even for a moment."""
        return self.step >= 0 or any(self.longest_seconds[Phase.FIRST :])


class ProgressReporter:
    """Publisher of this process's progress, called by one thread.

    Args:
        path: File to write; None publishes nothing, at the same cost.
        clock: Clock whose monotonic time is the host's.

    Attributes:
        is_reported_by_script: Whether the training loop itself calls :func:`heartbeat`.

    Raises:
        OSError: The file cannot be created.
    """

    def __init__(self, path: Path | None, clock: Clock) -> None:
        self.is_reported_by_script = False
        self._now_seconds = clock.monotonic_seconds
        self._memory: mmap.mmap | bytearray = bytearray(_SIZE)
        if path is not None:
            # Create a new file: a process that still maps the old file then continues to use it.
            path.unlink(missing_ok=True)
            with path.open("x+b") as file:
                # Write zeros instead of extending the file: a full disk must fail here, and not at
                # a later memory write.
                file.write(bytes(_SIZE))
                file.flush()
                self._memory = mmap.mmap(file.fileno(), _SIZE)
        self._sequence_number = 0
        self._step = -1
        self._phase = Phase.OUTSIDE
        self._since_seconds = clock.monotonic_seconds()
        self._in_step_seconds = 0.0
        self._own_seconds: float | None = None
        self._loaded_seconds = 0.0
        self._timed_steps = 0
        self._longest = [0.0] * len(Phase)
        self._write()

    @property
    def phase(self) -> Phase:
        """The phase that was entered last."""
        return self._phase

    def enter(self, phase: Phase) -> None:
        """Publish that a phase begins, or makes progress."""
        now_seconds = self._now_seconds()
        took_seconds = now_seconds - self._since_seconds
        previous_phase = self._phase
        if previous_phase is Phase.STEP:
            self._in_step_seconds += took_seconds
        elif previous_phase is Phase.LOADING:
            self._loaded_seconds += took_seconds
        if took_seconds > self._longest[previous_phase]:
            self._longest[previous_phase] = took_seconds
            _NUMBER.pack_into(
                self._memory, _LONGEST_AT + previous_phase * _NUMBER.size, took_seconds
            )
        self._phase, self._since_seconds = phase, now_seconds
        # This code runs six times per step and is repeated here, because a call would double its
        # cost.
        self._sequence_number = sequence_number = self._sequence_number + 1
        at = _HEAD.size if sequence_number & 1 else 0
        _WRITE_HEAD(
            self._memory,
            at,
            sequence_number,
            self._step,
            phase,
            now_seconds,
            self._timed_steps,
            sequence_number,
        )

    def again(self) -> None:
        """Publish that the current phase makes progress."""
        self.enter(self._phase)

    def during(self, phase: Phase) -> PhaseScope:
        """Return a context of ``phase`` that restores the previous phase; only in training."""
        return PhaseScope(self, phase)

    def begin_step(self) -> None:
        """Publish that a step begins; the atypical first step of an attempt keeps its phase."""
        if self._phase is not Phase.FIRST:
            self.enter(Phase.STEP)
        self._in_step_seconds = self._loaded_seconds = 0.0
        self._own_seconds = None

    def need_others(self) -> None:
        """Record that the step now needs other ranks; the time of the step so far is own time."""
        waited_seconds = self._now_seconds() - self._since_seconds
        self._own_seconds = self._loaded_seconds + self._in_step_seconds + waited_seconds

    def end_step(self, step: int) -> None:
        """Publish that optimizer step ``step`` is done."""
        self._end_step(step, is_timed=self._phase is Phase.STEP)

    def count_step(self, step: int) -> None:
        """Publish that a step is done; its time counts from the end of the previous step."""
        if self._phase is Phase.BETWEEN and self._step >= 0:
            self._in_step_seconds = self._now_seconds() - self._since_seconds
            self._own_seconds = None
            self._end_step(step, is_timed=True)
        else:
            self.end_step(step)

    def _end_step(self, step: int, *, is_timed: bool) -> None:
        self._step = step
        self.enter(Phase.BETWEEN)
        if is_timed:
            location = self._timed_steps % RECENT_STEPS * _NUMBER.size
            own_seconds = -1.0 if self._own_seconds is None else self._own_seconds
            _NUMBER.pack_into(self._memory, _RECENT_AT + location, self._in_step_seconds)
            _NUMBER.pack_into(self._memory, _OWN_AT + location, own_seconds)
            self._timed_steps += 1
            self._write()

    def _write(self) -> None:
        self._sequence_number = sequence_number = self._sequence_number + 1
        at = _HEAD.size if sequence_number & 1 else 0
        head = (
            sequence_number,
            self._step,
            self._phase,
            self._since_seconds,
            self._timed_steps,
            sequence_number,
        )
        _WRITE_HEAD(self._memory, at, *head)


class PhaseScope:
    """Context that ``ProgressReporter.during`` returns, entered once.

    This context is a class, because a generator-based context would be slower.

    Args:
        reporter: Reporter to publish with.
        phase: Phase inside the context.
    """

    __slots__ = ("_before", "_phase", "_reporter")

    def __init__(self, reporter: ProgressReporter, phase: Phase) -> None:
        self._reporter = reporter
        self._phase = self._before = phase

    def __enter__(self) -> None:
        reporter = self._reporter
        self._before = reporter.phase
        reporter.enter(Phase.OUTSIDE if self._before is Phase.OUTSIDE else self._phase)

    def __exit__(self, *_: object) -> None:
        self._reporter.enter(self._before)


def read_progress(path: Path) -> ProgressRecord | None:
    """Return the progress record at ``path``; None if there is none."""
    data = b""
    for _ in range(_READS_MAX):
        try:
            previous_data, data = data, path.read_bytes()
        except OSError:
            return None
        # Two equal reads mean that the file was not being written meanwhile.
        if data == previous_data:
            break
    return _parse(data) if len(data) == _SIZE else None


def _parse(data: bytes) -> ProgressRecord | None:
    heads = [_HEAD.unpack_from(data, at) for at in (0, _HEAD.size)]
    complete = [head for head in heads if head[0] == head[-1] and head[2] < len(Phase)]
    sequence_number, step, phase, since_seconds, step_count, _ = max(complete, default=_EMPTY)
    if not sequence_number:
        return None
    count = min(step_count, RECENT_STEPS)
    own_seconds = _numbers(data, _OWN_AT, count)
    return ProgressRecord(
        step=step,
        phase=Phase(phase),
        since_seconds=since_seconds,
        longest_seconds=_numbers(data, _LONGEST_AT, len(Phase)),
        step_seconds=_numbers(data, _RECENT_AT, count),
        own_seconds=own_seconds if all(second >= 0 for second in own_seconds) else (),
    )


def _numbers(data: bytes, at: int, count: int) -> tuple[float, ...]:
    return struct.unpack_from(f"<{count}d", data, at)


def progress_path(agent_folder: str, local_rank: int) -> Path:
    """Return the progress file of a rank of this host; ``agent_folder`` is the agent's folder."""
    return Path(agent_folder, f"pulse-{local_rank}")


def stacks_path(agent_folder: str, local_rank: int) -> Path:
    """Return the file for the stacks of a rank of this host."""
    return Path(agent_folder, f"stacks-{local_rank}")


# A process publishes its progress in one file.
_own_reporter: list[tuple[str, ProgressReporter]] = []


def progress_reporter() -> ProgressReporter:
    """Return this process's reporter; the first call opens it and enables the stack signal.

    Without an agent, or if the agent's folder is not writable, the progress is not visible.
    """
    launch = read_launch(os.environ)
    location = f"{launch.notes}#{launch.attempt}#{launch.world.local_rank}"
    if _own_reporter and _own_reporter[0][0] == location:
        return _own_reporter[0][1]
    try:
        reporter = _open(launch.notes, launch.world.local_rank)
    except OSError:
        reporter = ProgressReporter(None, SystemClock())
    _own_reporter[:] = [(location, reporter)]
    return reporter


def _open(agent_folder: str, local_rank: int) -> ProgressReporter:
    if not agent_folder:
        return ProgressReporter(None, SystemClock())
    reporter = ProgressReporter(progress_path(agent_folder, local_rank), SystemClock())
    # The descriptor is never closed: the signal handler writes to it until this process ends.
    path = stacks_path(agent_folder, local_rank)
    path.unlink(missing_ok=True)
    stacks = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True, chain=False)
    # Write the process id last: a reader of the file may send the signal at once.
    os.write(stacks, f"{os.getpid()}\n".encode())
    return reporter


def heartbeat(step: int | None = None) -> None:
    """Report the progress of a user's own loop to the agent.

    A job whose ranks never call this function never counts as hung. A call with ``step`` marks this
    optimizer step as done. The time until the next call with a step counts as one step. After a few
    steps the agent knows their duration, and a much longer step counts as a hang. A call without
    ``step`` marks the beginning of other work (an evaluation, a save). Until the next call with a
    step the agent then uses ``--hang-patience``. A call costs about two microseconds. Outside
    ``resilient train`` a call does nothing.

    Args:
        step: Optimizer step that is done.
    """
    reporter = progress_reporter()
    reporter.is_reported_by_script = True
    if step is None:
        reporter.enter(Phase.BETWEEN)
        return
    if reporter.phase is Phase.OUTSIDE:
        reporter.enter(Phase.FIRST)
    reporter.end_step(step)
    reporter.begin_step()


_NAME = "torch._dynamo.callback"


@contextmanager
def report_compilation(reporter: ProgressReporter, *, is_wanted: bool = False) -> Iterator[None]:
    """Publish compilations inside the context.

    Args:
        reporter: Reporter to publish with.
        is_wanted: Whether compilations are expected. If False, compilations are published only if
            the compiler is already imported, because its import takes a second.
    """
    module: Any = import_module(_NAME) if is_wanted else sys.modules.get(_NAME)
    if module is None:
        yield
        return
    previous_phases: list[Phase] = []

    def begin(_: object) -> None:
        previous_phases.append(reporter.phase)
        reporter.enter(Phase.COMPILING)

    def end(_: object) -> None:
        reporter.enter(previous_phases.pop())

    handler = module.callback_handler
    handler.register_start_callback(begin)
    handler.register_end_callback(end)
    try:
        yield
    finally:
        handler.remove_start_callback(begin)
        handler.remove_end_callback(end)


class LoopHeartbeat:
    """Heartbeat of a loop, until the loop calls ``resilient.heartbeat`` itself.

    The work between two optimizer steps is unknown, so the deadline for work outside steps applies.
    If an integration reports the begin of a step, the deadline of a step applies instead.

    Args:
        reporter: Reporter of this process.
    """

    def __init__(self, reporter: ProgressReporter) -> None:
        self._reporter = reporter
        self._step = 0
        self._compilers = ExitStack()

    def start(self, step: int) -> None:
        """Publish that training begins after ``step``."""
        self._step = step
        self._compilers.enter_context(report_compilation(self._reporter))
        if not self._reporter.is_reported_by_script:
            self._reporter.enter(Phase.FIRST)

    @property
    def steps(self) -> int:
        """Number of the last step that the optimizer made."""
        return self._step

    def begin_step(self) -> None:
        """Publish that a step begins."""
        if not self._reporter.is_reported_by_script:
            self._reporter.begin_step()

    def end_step(self, *_: Any) -> None:
        """Publish that the optimizer has made a step."""
        self._step += 1
        if not self._reporter.is_reported_by_script:
            self._reporter.count_step(self._step)

    def between(self) -> None:
        """Publish that work outside a step begins or continues.

        Outside training the phase does not change. Until the first step is done, the phase remains
        that of the first step.
        """
        if not self._reporter.is_reported_by_script:
            phase = self._reporter.phase
            self._reporter.enter(phase if phase in (Phase.OUTSIDE, Phase.FIRST) else Phase.BETWEEN)

    def saving(self) -> PhaseScope:
        """Return a context in which this rank is saving."""
        return self._reporter.during(Phase.SAVING)

    def stop(self) -> None:
        """Publish that training is over."""
        self._compilers.close()
        if not self._reporter.is_reported_by_script:
            self._reporter.enter(Phase.OUTSIDE)
