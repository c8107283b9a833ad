"""Tasks in virtual time: one runs at a time, and a seed decides who comes next.

A task is a thread, so the code that it runs is the library's own and knows nothing of this; but
it only runs while it holds the loop. It lets go where it sleeps or waits, and nowhere else.
"""

from __future__ import annotations

import heapq
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random


class Dead(BaseException):
    """The process of this task was killed here; no ``except Exception`` swallows it."""


@dataclass(eq=False)
class Task:
    """A thread of a simulated process.

    Attributes:
        turn: counts its waits, so that a wake-up for an earlier one is void.
        frozen_until_seconds: it is stopped, or its process swapped out, until then.
        result: what it returned; ``error``: what it raised.
    """

    name: str
    main: Callable[[], Any]
    lock: Any = field(default_factory=threading.Lock)
    turn: int = 0
    frozen_until_seconds: float = 0.0
    is_dead: bool = False
    is_done: bool = False
    result: Any = None
    error: BaseException | None = None


class Loop:
    """The time, and who is next; it is the clock of everybody in it.

    Args:
        draw: breaks ties and is asked for every delay.
    """

    def __init__(self, draw: Random) -> None:
        self.draw = draw
        self.now_seconds = 0.0
        self.switches = 0
        self._due: list[tuple[float, float, int, Task]] = []
        self._current: Task | None = None
        self._threads: list[threading.Thread] = []
        self._tasks: list[Task] = []
        self._waiting: dict[Task, Callable[[], bool]] = {}
        self._idle = threading.Lock()

    def monotonic_seconds(self) -> float:
        return self.now_seconds

    def now_iso(self) -> str:
        minutes, seconds = divmod(int(self.now_seconds), 60)
        days, minutes = divmod(minutes, 1440)
        hour, minute = divmod(minutes, 60)
        return f"2026-01-{1 + days % 28:02d}T{hour:02d}:{minute:02d}:{seconds:02d}.000Z"

    def spawn(self, name: str, main: Callable[[], Any]) -> Task:
        """Add a task that begins now."""
        task = Task(name, main)
        task.lock.acquire()
        self._tasks.append(task)
        thread = threading.Thread(target=self._run, args=(task,), name=f"sim-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()
        self._push(task, 0.0)
        return task

    def run(self) -> None:
        """Let all tasks come to their end; whoever waits for nothing that can come is killed."""
        self._idle.acquire()
        stuck = self._tasks
        while stuck:
            self._hand_on()
            self._idle.acquire()
            stuck = [task for task in self._tasks if not task.is_done]
            for task in stuck:
                self.kill(task)
        for thread in self._threads:
            thread.join()

    def sleep(self, seconds: float) -> None:
        """Let others run for so long."""
        task = self._mine()
        self._push(task, seconds)
        self._let_go(task)

    def wait(self, is_true: Callable[[], bool], within_seconds: float) -> bool:
        """Wait until a ``changed`` finds it true; say whether it is, at the end of the time."""
        task = self._mine()
        if is_true():
            return True
        if within_seconds <= 0:
            return False
        self._waiting[task] = is_true
        if within_seconds != float("inf"):
            self._push(task, within_seconds)
        self._let_go(task)
        return is_true()

    def changed(self) -> None:
        """Wake whoever waits for what is true now."""
        for task in [one for one, is_true in self._waiting.items() if is_true()]:
            self._waiting.pop(task)
            self._push(task, 0.0)

    def kill(self, task: Task) -> None:
        """End a task at its next turn, wherever it is."""
        if not task.is_done and not task.is_dead:
            task.is_dead, task.frozen_until_seconds = True, 0.0
            self._waiting.pop(task, None)
            self._push(task, 0.0)

    def freeze(self, task: Task, seconds: float) -> None:
        """Give a task no turn for so long, as SIGSTOP does."""
        task.frozen_until_seconds = self.now_seconds + seconds

    def _mine(self) -> Task:
        task = self._current
        assert task is not None, "only a task can wait"
        if task.is_dead:
            raise Dead
        return task

    def _push(self, task: Task, seconds: float) -> None:
        self._push_at(task, self.now_seconds + max(seconds, 0.0))

    def _push_at(self, task: Task, at_seconds: float) -> None:
        # Not from a difference: rounded down, a frozen task would be due again for ever.
        heapq.heappush(self._due, (at_seconds, self.draw.random(), task.turn, task))

    def _let_go(self, task: Task) -> None:
        if not self._hand_on(task):
            task.lock.acquire()
        if task.is_dead:
            raise Dead

    def _hand_on(self, mine: Task | None = None) -> bool:
        """Give the loop to who is next, or back to ``run``; True if that is ``mine``."""
        while self._due:
            at_seconds, _, turn, task = heapq.heappop(self._due)
            if task.is_done or turn != task.turn:
                continue
            if task.frozen_until_seconds > at_seconds:
                self._push_at(task, task.frozen_until_seconds)
                continue
            self.now_seconds = at_seconds
            self._waiting.pop(task, None)
            task.turn += 1
            self.switches += 1
            self._current = task
            if task is not mine:
                task.lock.release()
            return task is mine
        self._current = None
        self._idle.release()
        return False

    def _run(self, task: Task) -> None:
        task.lock.acquire()
        try:
            if not task.is_dead:
                task.result = task.main()
        except BaseException as error:  # noqa: BLE001 - whoever started it judges
            task.error = error
        task.is_done = True
        self.changed()
        self._hand_on()


class Condition:
    """What ``threading.Condition`` is to threads, for tasks: as much of it as the library uses."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def __enter__(self) -> None:
        """Take nothing: no other task runs inside."""

    def __exit__(self, *_: object) -> None:
        """Let go of nothing."""

    def wait_for(self, is_true: Callable[[], Any], timeout: float | None = None) -> Any:
        self._loop.wait(lambda: bool(is_true()), float("inf") if timeout is None else timeout)
        return is_true()

    def notify_all(self) -> None:
        self._loop.changed()
