"""The thread beside training: it copies what a forward pass leaves alone, and gets memory early."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError, Fenced, ResilientError, SaveFailed
from resilient.world.agreement import Failure, attempt

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator

    from resilient.state.copying import Copies


class Overlap:
    """At most one piece of work beside training, and the places where training waits for it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="resilient-stage")
        self._work: Future[Any] | None = None
        self._copies: Copies | None = None

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._work is None or self._work.done()

    @property
    def is_copying(self) -> bool:
        """Whether there are copies that nobody has settled."""
        return self._copies is not None

    def start(self, work: Callable[[], None]) -> None:
        """Do something that only concerns the saves to come; what it raises is forgotten."""
        self._work = self._thread.submit(attempt, work)

    def copy(
        self,
        copies: Copies,
        hand_over: Callable[[Failure | None], None],
        begin: threading.Event | None = None,
    ) -> None:
        """Make copies, then hand over: what was copied, or why it is worthless.

        Args:
            copies: to make.
            hand_over: what comes after.
            begin: what to wait for first; ``wait`` does not.
        """
        self._copies = copies
        self._work = self._thread.submit(_copy, copies, hand_over, begin)

    def wait(self) -> None:
        """Return when all is copied and handed over, and help to copy. Raises nothing of it."""
        if self._copies is not None and self._work is not None:
            self._copies.make()
            self._work.exception()

    def settle(self) -> None:
        """Wait, and let go of the work.

        Raises:
            SaveFailed: the copy could not be handed over.
            ResilientError: as the hand-over raised it.
        """
        self.wait()
        work, self._work, self._copies = self._work, None, None
        if work is None:
            return
        with handing_over():
            work.result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


@contextmanager
def handing_over() -> Iterator[None]:
    """Say that a save failed if it cannot be handed over, whatever the reason.

    Raises:
        SaveFailed: the body raised a ResilientError.
        Fenced: the body did.
        ConfigError: the body did.
    """
    try:
        yield
    except (SaveFailed, Fenced, ConfigError):
        raise
    except ResilientError as error:
        raise SaveFailed(
            f"what was staged could not be handed over: {error.message}; older checkpoints "
            "are intact",
            hint=error.hint or "mend the cause and run the same command again",
        ) from error


def _copy(
    copies: Copies,
    hand_over: Callable[[Failure | None], None],
    begin: threading.Event | None,
) -> None:
    if begin is not None:
        begin.wait()
    copies.make(modestly=True)
    unchanged = attempt(copies.require_unchanged)
    hand_over(unchanged if isinstance(unchanged, Failure) else None)
