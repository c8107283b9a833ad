"""What stands in the place of ``time``, ``datetime`` and ``threading`` for code in the loop."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from tests.simulation.loop import Loop, Task

if TYPE_CHECKING:
    from collections.abc import Callable

_FOREVER = float("inf")
_BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


class HostLoop(Loop):
    """A loop whose tasks belong to processes of hosts, and hear signals where they wait.

    A C function that waits hears none; it is not interrupted here either.
    """

    @property
    def process(self) -> Any:
        """The process that runs now; None outside."""
        return getattr(self._current, "process", None)

    @property
    def current(self) -> Task | None:
        """The task that runs now."""
        return self._current

    @property
    def is_within(self) -> bool:
        """Whether a task runs."""
        return self._current is not None

    def spawn(self, name: str, main: Callable[[], Any], process: Any = None) -> Task:
        """Add a task to a process, by default to the one that asks."""
        owner = process or self.process
        task = super().spawn(name, main)
        task.process = owner  # type: ignore[attr-defined]
        if owner is not None:
            owner.tasks.append(task)
        return task

    def _let_go(self, task: Task) -> None:
        super()._let_go(task)
        process = getattr(task, "process", None)
        while process is not None and task is process.main_task and process.signals:
            process.heard(process.signals.pop(0))


class Time:
    """``time``, as far as the code asks for it."""

    def __init__(self, loop: HostLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        process = self._loop.process
        return self._loop.now_seconds + (process.host.uptime_seconds if process else 0.0)

    def sleep(self, seconds: float) -> None:
        self._loop.sleep(seconds)

    def monotonic_seconds(self) -> float:
        return self.monotonic()

    def now_iso(self) -> str:
        return self._loop.now_iso()


class Datetime:
    """``datetime``: each host has a time of day of its own."""

    def __init__(self, loop: HostLoop) -> None:
        self._loop = loop

    def now(self, _zone: Any = None) -> datetime:
        process = self._loop.process
        skew_seconds = process.host.skew_seconds if process else 0.0
        return _BEGAN + timedelta(seconds=self._loop.now_seconds + skew_seconds)


class Event:
    """``threading.Event``."""

    def __init__(self, loop: HostLoop) -> None:
        self._loop = loop
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._loop.changed()

    def wait(self, timeout: float | None = None) -> bool:
        return self._loop.wait(self.is_set, _FOREVER if timeout is None else timeout)


class Lock:
    """``threading.Lock``, which may be held while its owner waits."""

    def __init__(self, loop: HostLoop) -> None:
        self._loop = loop
        self._is_held = False

    def __enter__(self) -> None:
        while self._is_held:
            self._loop.wait(lambda: not self._is_held, _FOREVER)
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False
        self._loop.changed()


class Thread:
    """``threading.Thread``: a task of the process that starts it."""

    def __init__(
        self, loop: HostLoop, target: Any, name: str = "", args: Any = (), *, daemon: bool = True
    ) -> None:
        self._loop, self._target, self._name, self._args = loop, target, name, args
        self._task: Task | None = None
        self.daemon = daemon

    def start(self) -> None:
        self._task = self._loop.spawn(self._name, lambda: self._target(*self._args))

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_done

    def join(self, timeout: float | None = None) -> None:
        # Torch's timers are joined by whoever drops them, which may be after the end of the world.
        if self._loop.is_within and self._task is not None:
            task, limit = self._task, _FOREVER if timeout is None else timeout
            self._loop.wait(lambda: task.is_done, limit)


class Threading:
    """``threading``, as far as the code asks for it."""

    def __init__(self, loop: HostLoop) -> None:
        self._loop = loop

    def Event(self) -> Event:  # noqa: N802 - as the module has it
        return Event(self._loop)

    def Lock(self) -> Lock:  # noqa: N802 - as the module has it
        return Lock(self._loop)

    def Thread(self, target: Any, name: str = "", args: Any = (), *, daemon: bool = True) -> Thread:  # noqa: N802
        return Thread(self._loop, target, name, args, daemon=daemon)
