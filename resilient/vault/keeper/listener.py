"""Who listens, while training goes on, for what became of a save that the keeper took over."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

from resilient.errors import PeerFailed, ResilientError
from resilient.vault.keeper.stream import feed
from resilient.world.agreement import Failure, attempt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.clock import Clock
    from resilient.vault.keeper.conversation import Conversation
    from resilient.vault.saving.persist import Job

_LOOK_SECONDS = 0.5


class Listener:
    """A thread that hears the verdict on one job, and gives the keeper the files it asks for.

    Args:
        to: returns the conversation with the keeper, which was told of the job; raises
            ``PeerFailed`` if there is none.
        job: as this rank has it.
        slots: the memory that the keeper may ask to be filled, by name.
        left_seconds: until this process must be gone; finite once somebody said so.
        clock: time.

    Attributes:
        heard: a Failure, or what the keeper said besides; only once the thread ended.
        took_seconds: from the beginning of the job until the verdict.
        rested_seconds: of these the keeper rested.
    """

    def __init__(
        self,
        to: Callable[[], Conversation],
        job: Job,
        slots: Mapping[str, memoryview],
        left_seconds: Callable[[], float],
        clock: Clock,
    ) -> None:
        self._to, self._job, self._slots, self._clock = to, job, slots, clock
        self._left_seconds = left_seconds
        self._is_awaited = False
        self.heard: Any = None
        self.took_seconds = self.rested_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="resilient-listen", daemon=True)
        self._thread.start()

    @property
    def is_listening(self) -> bool:
        """Whether there is no verdict yet."""
        return self._thread.is_alive()

    def join(self, is_called: Callable[[], bool] | None = None) -> bool:
        """Wait until there is a verdict or the keeper is given up.

        From here on the save is urgent, as it is once this process is to end.

        A keeper waits for those of all ranks. When one of them sleeps its rank alone knows, and
        the others would hear nothing for as long as a save may take.

        Args:
            is_called: says whether another rank has given its keeper up.

        Returns:
            Whether it did before there was a verdict.
        """
        self._is_awaited = True
        while self._thread.is_alive():
            self._thread.join(_LOOK_SECONDS)
            if is_called is not None and attempt(is_called) is True and self._thread.is_alive():
                return True
        return False

    def _run(self) -> None:
        self.heard = heard = attempt(self._hear)
        self.took_seconds = self._clock.monotonic_seconds() - self._job.began_seconds
        if not isinstance(heard, Failure):
            self.rested_seconds = float(heard["rested_seconds"])

    def _hear(self) -> dict[str, Any]:
        """Return when the keeper says that the job is durable.

        Raises:
            PeerFailed: the keeper did not take it, or is gone.
            ResilientError: its verdict.
        """
        talk = self._to()
        try:
            talk.hear()
        except ResilientError as error:
            raise PeerFailed(error.message) from error
        return feed(talk, self._job.streamed, self._slots, self._is_urgent)

    def _is_urgent(self) -> bool:
        return self._is_awaited or self._left_seconds() < math.inf
