"""Google Compute Engine: preemption and maintenance, by long polls of the metadata server.

Protocol: ``GET`` with the header ``Metadata-Flavor: Google``, which the answer repeats. With
``wait_for_change=true&last_etag=E`` the server answers when the value is another one, or after
``timeout_sec``. Compute Engine documentation, "View and query VM metadata" and "Spot VMs".
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlencode

from resilient.agent.notices.asking import Answer, Request, ask
from resilient.agent.notices.notice import Notice, SourceGarbled, SourceLost, unix_seconds

if TYPE_CHECKING:
    from resilient.clock import Clock

ENDPOINT = "http://metadata.google.internal"
PREEMPTED_SECONDS = 30.0
"""From the announcement of a preemption until the machine is off."""
_MAINTENANCE_SECONDS = 60.0
_INSTANCE = "/computeMetadata/v1/instance/"
_HEADERS = {"Metadata-Flavor": "Google"}
_MARGIN_SECONDS = 5.0


class GcpSource:
    """Waits for one value of the metadata server to change.

    Args:
        clock: tells when a change was heard.
        value: ``preempted`` or ``maintenance-event``.
        endpoint: of the server.
        wait_seconds: how long one long poll lasts.
    """

    # The wait is in the question.
    every_seconds = 0.2

    def __init__(
        self,
        clock: Clock,
        value: str,
        endpoint: str = ENDPOINT,
        *,
        wait_seconds: float = 60.0,
    ) -> None:
        self._clock = clock
        self._value = value
        self._endpoint = endpoint
        self._wait_seconds = wait_seconds
        self._etag = ""
        self._heard: Notice | None = None

    @property
    def name(self) -> str:
        """Which value this is of."""
        return f"gcp {self._value}"

    def look(self) -> Notice | None:
        """Return what the value means, after a change of it or the end of the poll.

        Raises:
            SourceLost: the server cannot be asked.
            SourceGarbled: something else than it answered.
        """
        answer = self._ask()
        if not answer.is_there:
            return None
        if answer.headers.get("metadata-flavor") != "Google":
            self._etag = ""
            raise SourceGarbled("it was not the metadata server that answered")
        self._etag = answer.headers.get("etag", "")
        notice = self._meaning(answer.text)
        if notice is None or self._heard is None or notice.reason != self._heard.reason:
            self._heard = notice
        # Said again it is the same notice, and not a new one with another deadline.
        return self._heard

    def acknowledge(self) -> None:
        """Do nothing: Compute Engine does not ask."""

    def close(self) -> None:
        """Hold nothing, so let go of nothing."""

    def _ask(self) -> Answer:
        query, seconds = {}, 2.0
        # The first question wants to know what is, the others what changes.
        if self._etag:
            query = {"wait_for_change": "true", "last_etag": self._etag}
            query["timeout_sec"] = str(max(1, round(self._wait_seconds)))
            seconds = self._wait_seconds + _MARGIN_SECONDS
        url = f"{self._endpoint}{_INSTANCE}{self._value}{'?' if query else ''}{urlencode(query)}"
        try:
            return ask(Request(url, headers=_HEADERS, seconds=seconds))
        except SourceLost:
            self._etag = ""
            raise

    def _meaning(self, text: str) -> Notice | None:
        now_seconds = unix_seconds(self._clock)
        match self._value, text:
            case (_, "FALSE" | "NONE" | "MIGRATE_ON_HOST_MAINTENANCE"):
                # A machine that is moved goes on running.
                return None
            case ("preempted", "TRUE"):
                return Notice("gcp: preempted", now_seconds + PREEMPTED_SECONDS)
            case ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"):
                return Notice("gcp: host maintenance", now_seconds + _MAINTENANCE_SECONDS)
        raise SourceGarbled(f"`{self._value}` is {text[:40]!r}, which nobody knows")
