"""Progress heartbeats of a rank, phases, loop heartbeat.

A rank's signs of progress, in a small file that it shares with the agent of its host.

A sign is a few stores into mapped memory: it costs about a microsecond, needs no network, and
the agent can read it whatever the rank and its collectives are doing. The times in it are those
of the monotonic clock, which all processes of a host share.

The same file's neighbour receives the stacks of all threads when the agent sends
:data:`STACKS_SIGNAL`: the handler is faulthandler's, in C, so that a rank answers which is stuck
inside a collective or holds the interpreter's lock.

Shows when torch's compiler is at work: a step may then take minutes, and is no hang.

The signs of progress of a loop that says no more than the steps of its optimizer.
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
"""Asks a worker for the stacks of its threads; nobody else uses it."""

RECENT_STEPS = 64

_HEAD = struct.Struct("<QqQdQ")  # signs, last step done, phase, since when, steps timed
_SIGNS = struct.Struct("<Q")
_NUMBER = struct.Struct("<d")
_WRITE_HEAD = _HEAD.pack_into
_READS_MAX = 5


class Phase(IntEnum):
    """What a rank is doing; how long it may take depends on it."""

    OUTSIDE = 0
    """Before training or after it: nobody knows how long that takes."""
    FIRST = 1
    """Restoring, and the first step: compilers run, loaders start."""
    STEP = 2
    BETWEEN = 3
    """Callbacks, logs, whatever is done between two steps."""
    LOADING = 4
    """Waiting for a batch."""
    EVALUATING = 5
    SAVING = 6
    COMPILING = 7


_LONGEST_AT = _HEAD.size
_RECENT_AT = _LONGEST_AT + len(Phase) * _NUMBER.size
_OWN_AT = _RECENT_AT + RECENT_STEPS * _NUMBER.size
_SIZE = _OWN_AT + RECENT_STEPS * _NUMBER.size


@dataclass(frozen=True, slots=True)
class ProgressRecord:
    """What a rank last showed.

    Attributes:
        step: the last optimizer step that it finished; -1 before the first.
        phase: what it is doing.
        since_seconds: since when, on the monotonic clock.
        longest_seconds: how long it has been in each phase at most, by phase.
        step_seconds: what recent steps took, without waiting for data, saves and the like.
        own_seconds: what of them it took before it needed other ranks; empty when not known.
    """

    step: int
    phase: Phase
    since_seconds: float
    longest_seconds: tuple[float, ...]
    step_seconds: tuple[float, ...]
    own_seconds: tuple[float, ...] = ()

    @property
    def has_trained(self) -> bool:
        """Whether it was in training, and if only for a moment."""
        return self.step >= 0 or any(self.longest_seconds[Phase.FIRST :])


class ProgressReporter:
    """Shows this process's progress. One thread calls it.

    Args:
        path: the file; None shows it to nobody, at the same cost.
        clock: its monotonic time is the host's.

    Attributes:
        is_told: whether a loop shows its progress itself, by :func:`heartbeat`.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path | None, clock: Clock) -> None:
        self.is_told = False
        self._now_seconds = clock.monotonic_seconds
        self._memory: mmap.mmap | bytearray = bytearray(_SIZE)
        if path is not None:
            # A new file: whoever still has the old one mapped keeps that.
            path.unlink(missing_ok=True)
            with path.open("x+b") as file:
                # Written, not only made longer: a full disk must fail here and not at a store.
                file.write(bytes(_SIZE))
                file.flush()
                self._memory = mmap.mmap(file.fileno(), _SIZE)
        self._signs = 0
        self._step = -1
        self._phase = Phase.OUTSIDE
        self._since_seconds = clock.monotonic_seconds()
        self._in_step_seconds = 0.0
        self._own_seconds: float | None = None
        self._loaded_seconds = 0.0
        self._timed = 0
        self._longest = [0.0] * len(Phase)
        self._write()

    @property
    def phase(self) -> Phase:
        """What was last entered."""
        return self._phase

    def enter(self, phase: Phase) -> None:
        """Show that something begins, or goes on, and is alive."""
        now_seconds = self._now_seconds()
        took_seconds = now_seconds - self._since_seconds
        before = self._phase
        if before is Phase.STEP:
            self._in_step_seconds += took_seconds
        elif before is Phase.LOADING:
            self._loaded_seconds += took_seconds
        if took_seconds > self._longest[before]:
            self._longest[before] = took_seconds
            _NUMBER.pack_into(self._memory, _LONGEST_AT + before * _NUMBER.size, took_seconds)
        self._phase, self._since_seconds = phase, now_seconds
        self._signs += 1
        # Six times a step: said here once more, as a call would cost as much as the rest.
        _WRITE_HEAD(self._memory, 0, self._signs, self._step, phase, now_seconds, self._timed)

    def again(self) -> None:
        """Show that what goes on gets on."""
        self.enter(self._phase)

    def during(self, phase: Phase) -> PhaseScope:
        """Be in ``phase`` inside, and in what it was before afterwards; outside training, stay."""
        return PhaseScope(self, phase)

    def begin_step(self) -> None:
        """Show that a step begins; the first of a life stays what it is, it says little."""
        if self._phase is not Phase.FIRST:
            self.enter(Phase.STEP)
        self._in_step_seconds = self._loaded_seconds = 0.0
        self._own_seconds = None

    def need_others(self) -> None:
        """Note that the step needs the other ranks from here on: what it took so far is its own."""
        waited_seconds = self._now_seconds() - self._since_seconds
        self._own_seconds = self._loaded_seconds + self._in_step_seconds + waited_seconds

    def end_step(self, step: int) -> None:
        """Show that optimizer step ``step`` is done."""
        self._end_step(step, is_timed=self._phase is Phase.STEP)

    def count_step(self, step: int) -> None:
        """Show that a step is done where nobody says when one begins: at the end of another."""
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
            place = self._timed % RECENT_STEPS * _NUMBER.size
            own_seconds = -1.0 if self._own_seconds is None else self._own_seconds
            _NUMBER.pack_into(self._memory, _RECENT_AT + place, self._in_step_seconds)
            _NUMBER.pack_into(self._memory, _OWN_AT + place, own_seconds)
            self._timed += 1
            self._write()

    def _write(self) -> None:
        self._signs += 1
        _WRITE_HEAD(
            self._memory, 0, self._signs, self._step, self._phase, self._since_seconds, self._timed
        )


class PhaseScope:
    """What ``Pulse.during`` returns: a context, entered once. A generator's would cost a step more.

    Args:
        pulse: what shows it.
        phase: inside.
    """

    __slots__ = ("_before", "_phase", "_pulse")

    def __init__(self, pulse: ProgressReporter, phase: Phase) -> None:
        self._pulse = pulse
        self._phase = self._before = phase

    def __enter__(self) -> None:
        pulse = self._pulse
        self._before = pulse.phase
        pulse.enter(Phase.OUTSIDE if self._before is Phase.OUTSIDE else self._phase)

    def __exit__(self, *_: object) -> None:
        self._pulse.enter(self._before)


def read_progress(path: Path) -> ProgressRecord | None:
    """Return what the pulse at ``path`` shows, None while there is none."""
    data = b""
    for _ in range(_READS_MAX):
        try:
            before, data = data, path.read_bytes()
        except OSError:
            return None
        # Read twice alike, it was not being written meanwhile.
        if data == before:
            break
    return _parse(data) if len(data) == _SIZE else None


def _parse(data: bytes) -> ProgressRecord | None:
    signs, step, phase, since_seconds, timed = _HEAD.unpack_from(data)
    if not signs or phase >= len(Phase):
        return None
    count = min(timed, RECENT_STEPS)
    own_seconds = _numbers(data, _OWN_AT, count)
    return ProgressRecord(
        step=step,
        phase=Phase(phase),
        since_seconds=since_seconds,
        longest_seconds=_numbers(data, _LONGEST_AT, len(Phase)),
        step_seconds=_numbers(data, _RECENT_AT, count),
        own_seconds=own_seconds if all(one >= 0 for one in own_seconds) else (),
    )


def _numbers(data: bytes, at: int, count: int) -> tuple[float, ...]:
    return struct.unpack_from(f"<{count}d", data, at)


def progress_path(notes: str, local_rank: int) -> Path:
    """Return where the pulse of a rank of this host lies; ``notes`` is the agent's folder."""
    return Path(notes, f"pulse-{local_rank}")


def stacks_path(notes: str, local_rank: int) -> Path:
    """Return where a rank of this host writes its stacks."""
    return Path(notes, f"stacks-{local_rank}")


# A process has one progress to show, and one file to show it in.
_own: list[tuple[str, ProgressReporter]] = []


def progress_reporter() -> ProgressReporter:
    """Return this process's pulse; the first call opens it and makes stacks answerable.

    Without an agent of ours, or where its folder cannot be written, nobody sees it.
    """
    launch = read_launch(os.environ)
    place = f"{launch.notes}#{launch.attempt}#{launch.world.local_rank}"
    if _own and _own[0][0] == place:
        return _own[0][1]
    try:
        pulse = _open(launch.notes, launch.world.local_rank)
    except OSError:
        pulse = ProgressReporter(None, SystemClock())
    _own[:] = [(place, pulse)]
    return pulse


def _open(notes: str, local_rank: int) -> ProgressReporter:
    if not notes:
        return ProgressReporter(None, SystemClock())
    pulse = ProgressReporter(progress_path(notes, local_rank), SystemClock())
    # Not closed: the handler writes there for as long as this process lives.
    path = stacks_path(notes, local_rank)
    path.unlink(missing_ok=True)
    stacks = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True, chain=False)
    # Last, and at once: whoever reads it may send the signal.
    os.write(stacks, f"{os.getpid()}\n".encode())
    return pulse


def heartbeat(step: int | None = None) -> None:
    """Tell the agent that this rank gets on, from a loop of one's own.

    A job whose ranks never call it is never taken for hung. With ``step`` it says that this
    optimizer step is done, and the time to the next call with a step is a step: after a few of
    them the agent knows how long one takes, and a much longer one is a hang. Without, it says that
    something other than a step begins (an evaluation, a save): until the next call with a step
    the agent has patience (``--hang-patience``). Costs about two microseconds; outside
    ``resilient train`` it does nothing.

    Args:
        step: the optimizer step that is done.
    """
    pulse = progress_reporter()
    pulse.is_told = True
    if step is None:
        pulse.enter(Phase.BETWEEN)
        return
    if pulse.phase is Phase.OUTSIDE:
        pulse.enter(Phase.FIRST)
    pulse.end_step(step)
    pulse.begin_step()


_NAME = "torch._dynamo.callback"


@contextmanager
def report_compilation(pulse: ProgressReporter, *, is_wanted: bool = False) -> Iterator[None]:
    """Show compilations inside.

    Args:
        pulse: what shows them.
        is_wanted: whether there will be any. Without, they are shown if somebody has imported the
            compiler already; it costs a second, so not for nothing.
    """
    module: Any = import_module(_NAME) if is_wanted else sys.modules.get(_NAME)
    if module is None:
        yield
        return
    before: list[Phase] = []

    def begin(_: object) -> None:
        before.append(pulse.phase)
        pulse.enter(Phase.COMPILING)

    def end(_: object) -> None:
        pulse.enter(before.pop())

    handler = module.callback_handler
    handler.register_start_callback(begin)
    handler.register_end_callback(end)
    try:
        yield
    finally:
        handler.remove_start_callback(begin)
        handler.remove_end_callback(end)


class LoopHeartbeat:
    """Shows a loop's progress for it, until it calls ``resilient.heartbeat`` and shows its own.

    Nobody knows what a loop does between two steps of its optimizer, so that has the patience of
    what is no step; an adapter that is told when a step begins says so, and it has a step's.

    Args:
        pulse: of this process.
    """

    def __init__(self, pulse: ProgressReporter) -> None:
        self._pulse = pulse
        self._step = 0
        self._compilers = ExitStack()

    def start(self, step: int) -> None:
        """Show that training begins after ``step``."""
        self._step = step
        self._compilers.enter_context(report_compilation(self._pulse))
        if not self._pulse.is_told:
            self._pulse.enter(Phase.FIRST)

    @property
    def steps(self) -> int:
        """Number of the last step that the optimizer made."""
        return self._step

    def begin_step(self) -> None:
        """Show that a step begins."""
        if not self._pulse.is_told:
            self._pulse.begin_step()

    def end_step(self, *_: Any) -> None:
        """Show that the optimizer has made a step."""
        self._step += 1
        if not self._pulse.is_told:
            self._pulse.count_step(self._step)

    def between(self) -> None:
        """Show that something begins or goes on that is no step.

        Outside training it stays outside, and before the first step is done it is a part of that.
        """
        if not self._pulse.is_told:
            phase = self._pulse.phase
            self._pulse.enter(phase if phase in (Phase.OUTSIDE, Phase.FIRST) else Phase.BETWEEN)

    def saving(self) -> PhaseScope:
        """Be saving inside."""
        return self._pulse.during(Phase.SAVING)

    def stop(self) -> None:
        """Show that training is over."""
        self._compilers.close()
        if not self._pulse.is_told:
            self._pulse.enter(Phase.OUTSIDE)
