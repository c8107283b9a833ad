"""A URL of the user's own, asked again and again: 404 or 204 is no notice, 200 with JSON is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.agent.notices.asking import Request, ask
from resilient.agent.notices.notice import Notice, notice_of, unix_seconds

if TYPE_CHECKING:
    from resilient.clock import Clock


class PolledSource:
    """Asks a URL.

    Args:
        clock: tells when a notice was first heard, from where its ``seconds`` count.
        url: answers with ``{"reason": ..., "seconds": ...}`` or ``{"at": ...}`` when it is time.
        seconds: how long one request may take.
    """

    every_seconds = 2.0

    def __init__(self, clock: Clock, url: str, *, seconds: float = 5.0) -> None:
        self._clock = clock
        self._url = url
        self._seconds = seconds
        self._since_seconds: float | None = None

    @property
    def name(self) -> str:
        """Which URL this is, without what may be secret."""
        return self._url.partition("?")[0].rpartition("@")[2]

    def look(self) -> Notice | None:
        """Return what the URL says.

        Raises:
            SourceLost: it cannot be asked.
            SourceGarbled: the answer makes no sense.
        """
        answer = ask(Request(self._url, seconds=self._seconds))
        if not answer.is_there:
            self._since_seconds = None
            return None
        if self._since_seconds is None:
            self._since_seconds = unix_seconds(self._clock)
        return notice_of(answer.document, "http", self._since_seconds)

    def acknowledge(self) -> None:
        """Do nothing: the exit of the agent is the answer."""

    def close(self) -> None:
        """Hold nothing, so let go of nothing."""
