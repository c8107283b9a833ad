"""Stack dumps of all ranks of this host, taken after a hang and before any rank is killed.

A rank answers :data:`resilient.distributed.heartbeat.STACKS_SIGNAL` with the Python stacks of all
its threads. A stopped process (SIGSTOP) cannot answer. The agent, the process that started the
ranks, therefore first reads the state of each process from the kernel. The agent then sends
``STACKS_SIGNAL``, and once SIGCONT, to each rank that has a handler for ``STACKS_SIGNAL``. Stopped
ranks then answer too. A moment later, the agent kills the ranks. A process does not answer in an
uninterruptible sleep (state D), or without a handler for the signal. The dump then has only the
kernel state of the process and a note.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from resilient.distributed.heartbeat import STACKS_SIGNAL, stacks_path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from resilient.clock import Clock

_ANSWER_SECONDS = 2.0
_POLL_SECONDS = 0.02
_QUIET_POLLS = 3
_STALLED_POLLS = 30
"""Polls without a new byte after which an answer without the main thread is final."""
_TEXT_BYTES_MAX = 1 << 18
_PROC = Path("/proc")
_FIELDS = ("State", "Threads", "VmRSS", "SigQ", "voluntary_ctxt_switches")
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')


@dataclass(frozen=True, slots=True)
class RankStacks:
    """Stacks and kernel state of one rank.

    Attributes:
        rank: Global rank.
        kernel: Report of the kernel: process state, and where each thread waits.
        stacks: Stacks of all threads as faulthandler prints them; empty without an answer.
        is_answered: Whether the rank answered.
    """

    rank: int
    kernel: str
    stacks: str
    is_answered: bool

    @property
    def innermost(self) -> str:
        """Innermost frame of the main thread in one line; the main thread is printed last."""
        frames = [_FRAME.match(line) for line in main_stack(self.stacks)]
        frame_or_none = next((frame for frame in frames if frame), None)
        if not frame_or_none:
            return ""
        return (
            f"{frame_or_none['name']} ({Path(frame_or_none['file']).name}:{frame_or_none['line']})"
        )


@dataclass(frozen=True, slots=True)
class _StackRequest:
    path: Path
    size: int
    pid: int


def collect_stacks(
    agent_folder: str, pids: Mapping[int, int], ranks: Mapping[int, int], clock: Clock
) -> list[RankStacks]:
    """Collect the stacks of all ranks of this host within 2 s.

    Args:
        agent_folder: Folder of the agent.
        pids: Process id by local rank; unreaped, so that no id belongs to another process.
        ranks: Global rank by local rank.
        clock: Clock for the time limit.
    """
    kernel = {local: describe(pid) for local, pid in pids.items()}
    requests = {
        local: request
        for local in pids
        if (request := _request_stacks(agent_folder, local)) is not None
    }
    for value in [*requests.values()]:
        _send(value.pid, signal.SIGCONT)
    for local in pids.keys() - requests.keys():
        # The rank has no handler for the request. A stopped rank stays stopped.
        kernel[local] += "\nno stack: the process has no handler for it"
    texts = _wait_for_answers(requests, clock)
    return [
        RankStacks(ranks[local], kernel[local], texts.get(local, ""), bool(texts.get(local)))
        for local in sorted(pids)
    ]


def describe(pid: int, proc: Path = _PROC) -> str:
    """Return the kernel's report on a process and each of its threads."""
    folder = proc / str(pid)
    lines = [line for line in _read(folder / "status").splitlines() if line.startswith(_FIELDS)]
    for task in sorted(_tasks(folder), key=lambda path: int(path.name)):
        name, wait = _read(task / "comm").strip(), _read(task / "wchan").strip()
        # An empty wait channel reads as 0.
        wait_text = f" in {wait}" if wait not in ("", "0") else ""
        lines.append(f"thread {task.name} {name}: {state_of(pid, task) or '?'}{wait_text}")
        # Only root can read the stack, and not in every container.
        lines += [f"    {line}" for line in _read(task / "stack").splitlines()]
    return "\n".join(line.replace("\t", " ") for line in lines)


def state_of(pid: int, folder: Path | None = None) -> str:
    """Return the letter of a process state (R, S, D, T, Z, ...), empty if the process is gone."""
    text = _read((folder or _PROC / str(pid)) / "stat")
    return text.rpartition(")")[2].split()[0] if ")" in text else ""


def main_stack(text: str) -> list[str]:
    """Return the lines of the main thread's stack, innermost frame first."""
    return text.rstrip().rpartition("\n\n")[2].splitlines()


def group_by_stack(stacks: Sequence[RankStacks]) -> dict[tuple[int, ...], RankStacks]:
    """Group ranks whose main threads are at the same place, so that each stack is shown once."""
    groups: dict[str, list[RankStacks]] = {}
    for stack in stacks:
        key = "\n".join(main_stack(stack.stacks)[1:]) if stack.is_answered else stack.kernel
        groups.setdefault(key, []).append(stack)
    return {tuple(worker.rank for worker in group): group[0] for group in groups.values()}


def _request_stacks(agent_folder: str, local_rank: int) -> _StackRequest | None:
    path = stacks_path(agent_folder, local_rank)
    head = _read(path).split("\n", 1)[0]
    if not head.isdecimal():
        return None
    request = _StackRequest(path, path.stat().st_size, int(head))
    return request if _send(request.pid, STACKS_SIGNAL) else None


def _send(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _wait_for_answers(requests: Mapping[int, _StackRequest], clock: Clock) -> dict[int, str]:
    """Wait until no answer grows any more.

    Answers are written frame by frame, on a busy machine with pauses; the main thread comes last.
    """
    deadline_seconds = clock.monotonic_seconds() + _ANSWER_SECONDS
    answers = dict.fromkeys(requests, "")
    unchanged_polls, quiet_polls = 0, _QUIET_POLLS
    while unchanged_polls < quiet_polls and clock.monotonic_seconds() < deadline_seconds:
        clock.sleep(_POLL_SECONDS)
        new_answers = {local: _answer(value) for local, value in requests.items()}
        unchanged_polls = (
            unchanged_polls + 1 if all(new_answers.values()) and new_answers == answers else 0
        )
        quiet_polls = (
            _QUIET_POLLS if all(map(_is_complete, new_answers.values())) else _STALLED_POLLS
        )
        answers = new_answers
    return answers


def _is_complete(answer: str) -> bool:
    """Return whether an answer ends with a main thread's outermost call, or the 100th frame."""
    return answer.endswith((" in <module>", " in _run_module_as_main", "  ..."))


def _answer(request: _StackRequest) -> str:
    with request.path.open("rb") as file:
        file.seek(request.size)
        return file.read(_TEXT_BYTES_MAX).decode(errors="replace").strip()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _tasks(folder: Path) -> list[Path]:
    try:
        return list((folder / "task").iterdir())
    except OSError:
        return []
