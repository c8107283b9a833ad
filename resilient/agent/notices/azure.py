"""Azure: scheduled events of the instance metadata service, and their acknowledgement.

Protocol: ``GET /metadata/scheduledevents?api-version=2020-07-01`` with the header
``Metadata: true``. An event is acknowledged by a ``POST`` of its id to the same address; then
Azure does not wait until ``NotBefore``. The first question turns the service on and may take two
minutes. Azure documentation, "Scheduled Events for Linux VMs".
"""

from __future__ import annotations

import json
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from resilient.agent.notices.asking import Request, ask
from resilient.agent.notices.notice import Notice, SourceGarbled, SourceLost

if TYPE_CHECKING:
    from collections.abc import Mapping

ENDPOINT = "http://169.254.169.254"
_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_HEADERS = {"Metadata": "true"}
_FIRST_SECONDS = 130.0
_ENDINGS = ("Preempt", "Terminate", "Reboot", "Redeploy")
"""A ``Freeze`` pauses the machine for some seconds, and training goes on afterwards."""


class AzureSource:
    """Asks for events of this machine.

    Args:
        endpoint: of the service.
        acknowledges: whether Azure is told that it may take the machine when all is saved. Leave
            it where others have work on the machine, as on a node of Kubernetes.
        seconds: how long one request may take, after the first.
    """

    name = "azure"
    every_seconds = 1.0

    def __init__(
        self, endpoint: str = ENDPOINT, *, acknowledges: bool = False, seconds: float = 5.0
    ) -> None:
        self._endpoint = endpoint
        self._acknowledges = acknowledges
        self._seconds = seconds
        self._machine: str | None = None
        self._is_on = False
        self._heard: list[str] = []

    def look(self) -> Notice | None:
        """Return the event of this machine that comes first.

        Raises:
            SourceLost: the service cannot be asked.
            SourceGarbled: the answer makes no sense.
        """
        if self._machine is None:
            self._machine = self._find_name()
        seconds = self._seconds if self._is_on else _FIRST_SECONDS
        answer = ask(Request(self._endpoint + _EVENTS, headers=_HEADERS, seconds=seconds))
        if not answer.is_there:
            return None
        events = answer.document.get("Events")
        if not isinstance(events, list):
            raise SourceGarbled(f"there is no list of events: {answer.text[:60]!r}")
        self._is_on = True
        mine = [one for one in events if isinstance(one, dict) and self._is_mine(one)]
        self._heard = [str(one["EventId"]) for one in mine if one.get("EventId")]
        notices = [_notice(one) for one in mine]
        return min(notices, key=lambda one: one.at_seconds or 0.0, default=None)

    def acknowledge(self) -> None:
        """Tell Azure that it need not wait any longer, if that was asked for.

        Raises:
            SourceLost: it was not heard.
        """
        if not self._acknowledges or not self._heard:
            return
        body = json.dumps({"StartRequests": [{"EventId": one} for one in self._heard]}).encode()
        answer = ask(Request(self._endpoint + _EVENTS, "POST", _HEADERS, body, self._seconds))
        if not answer.is_there:
            raise SourceLost("the events to acknowledge are not there any more")

    def close(self) -> None:
        """Hold nothing, so let go of nothing."""

    def _find_name(self) -> str | None:
        """Return the machine's name; machines of a set hear of each other's events."""
        request = Request(self._endpoint + _NAME, headers=_HEADERS, seconds=self._seconds)
        try:
            answer = ask(request)
            name = answer.text if answer.is_there else ""
        except (SourceLost, SourceGarbled):
            return None
        return name

    def _is_mine(self, event: Mapping[str, Any]) -> bool:
        resources = event.get("Resources")
        # Without a name to compare, stopping for another machine costs less than not stopping.
        is_here = not self._machine or not isinstance(resources, list) or self._machine in resources
        return is_here and event.get("EventType") in _ENDINGS


def _notice(event: Mapping[str, Any]) -> Notice:
    reason = f"azure: {str(event['EventType']).lower()}"
    try:
        # Empty once the event has started.
        return Notice(reason, parsedate_to_datetime(str(event["NotBefore"])).timestamp())
    except (KeyError, ValueError, TypeError):
        return Notice(reason)
