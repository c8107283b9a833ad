"""Preemption notices of AWS, Azure and GCP, from their metadata servers.

AWS: spot interruptions and rebalance recommendations. The source gets a token by
``PUT /latest/api/token`` (IMDSv2), and then sends ``GET`` with the token. The server answers 404 if
there is no notice. See Amazon EC2 User Guide, "Spot Instance interruption notices" and "Use the
Instance Metadata Service". The answer to the ``PUT`` has an IP hop limit, 1 by default, so the
answer may never arrive in a container. The source then sends its requests without a token, which
works if IMDSv1 is allowed.

Azure: scheduled events and their acknowledgement. The source sends ``GET
/metadata/scheduledevents?api-version=2020-07-01`` with the header ``Metadata: true``. A ``POST`` of
an event's id to the same address acknowledges the event. Azure can then start the event before the
time in its ``NotBefore`` field. The first request turns the service on and may take two minutes.
See Azure documentation, "Scheduled Events for Linux VMs".

GCP: preemption and maintenance by long polls. The source sends ``GET`` with the header
``Metadata-Flavor: Google``, which the answer repeats. With ``wait_for_change=true&last_etag=E``
the server answers when the value changes, or after ``timeout_sec``. See Compute Engine
documentation, "View and query VM metadata" and "Spot VMs".
"""

from __future__ import annotations

import json
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from resilient.elastic.preemption.metadata_http import MetadataRequest, MetadataResponse, http_get
from resilient.elastic.preemption.notice import (
    Notice,
    SourceGarbled,
    SourceLost,
    moment_of,
    unix_seconds,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.clock import Clock

METADATA_ENDPOINT = "http://169.254.169.254"
"""Address of the metadata server on AWS and on Azure."""
_TOKEN_TTL_SECONDS = 21_600
_RENEW_SECONDS = _TOKEN_TTL_SECONDS / 2
_ACTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
_OK, _BAD_REQUEST, _UNAUTHORIZED, _FORBIDDEN = 200, 400, 401, 403


class AwsSource:
    """Source of spot interruptions from the EC2 instance metadata service.

    Args:
        clock: Clock for the age of the token.
        endpoint: Address of the service.
        stops_on_rebalance: Whether a rebalance recommendation stops training; otherwise it is
            only reported.
        seconds: Timeout of one request.
    """

    name = "aws"
    every_seconds = 5.0

    def __init__(
        self,
        clock: Clock,
        endpoint: str = METADATA_ENDPOINT,
        *,
        stops_on_rebalance: bool = False,
        seconds: float = 2.0,
    ) -> None:
        self._clock = clock
        self._endpoint = endpoint
        self._stops_on_rebalance = stops_on_rebalance
        self._seconds = seconds
        self._token = ""
        self._token_at_seconds = 0.0
        self._why_no_token = ""

    def look(self) -> Notice | None:
        """Return an announced interruption, else a recommendation, else None.

        Raises:
            SourceLost: The service does not answer. If the hop limit may be the cause, the error
                names the fix.
            SourceGarbled: The answer is invalid.
        """
        action = self._get(_ACTION)
        if action.is_there:
            return _interruption(action)
        advice = self._get(_REBALANCE)
        if advice.is_there:
            return Notice("aws: rebalance recommended", None, not self._stops_on_rebalance)
        return None

    def acknowledge(self) -> None:
        """Do nothing: EC2 has no acknowledgement."""

    def close(self) -> None:
        """Do nothing: the source has no resources."""

    def _get(self, path: str) -> MetadataResponse:
        answer = self._get_once(path)
        if answer.status == _UNAUTHORIZED and self._token:
            self._token = ""
            answer = self._get_once(path)
        if answer.status in (_UNAUTHORIZED, _FORBIDDEN):
            raise SourceLost(
                f"the metadata service refused {path} with status {answer.status}"
                + (f", and gave no token: {self._why_no_token}" if self._why_no_token else "")
            )
        return answer

    def _get_once(self, path: str) -> MetadataResponse:
        token = self._renewed()
        headers = {"X-aws-ec2-metadata-token": token} if token else {}
        return http_get(
            MetadataRequest(self._endpoint + path, headers=headers, seconds=self._seconds)
        )

    def _renewed(self) -> str:
        """Return a valid token, or an empty string if none is available."""
        now_seconds = self._clock.monotonic_seconds()
        if self._token and now_seconds - self._token_at_seconds < _RENEW_SECONDS:
            return self._token
        self._token, self._why_no_token = "", ""
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_SECONDS)}
        url = f"{self._endpoint}/latest/api/token"
        try:
            answer = http_get(MetadataRequest(url, "PUT", headers, b"", self._seconds))
        except SourceLost as error:
            self._why_no_token = (
                f"{error}; inside a container the hop limit must be 2: aws ec2 "
                "modify-instance-metadata-options --http-put-response-hop-limit 2"
            )
            return ""
        if answer.status != _OK or not answer.text.isprintable():
            self._why_no_token = f"the request for one was answered with status {answer.status}"
            return ""
        self._token, self._token_at_seconds = answer.text, now_seconds
        return self._token


def _interruption(answer: MetadataResponse) -> Notice:
    document = answer.document
    action = document.get("action")
    if action not in ("terminate", "stop", "hibernate"):
        raise SourceGarbled(f"an unknown instance action: {str(action)[:40]!r}")
    try:
        return Notice(f"aws: spot {action}", moment_of(str(document.get("time"))))
    except SourceGarbled:
        # The action alone is clear: the interruption comes at an unknown time.
        return Notice(f"aws: spot {action}")


_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_AZURE_HEADERS = {"Metadata": "true"}
_FIRST_SECONDS = 130.0
_ENDINGS = ("Preempt", "Terminate", "Reboot", "Redeploy")
"""Events that end the machine; a ``Freeze`` only pauses the machine for some seconds."""


class AzureSource:
    """Source of scheduled events of this machine.

    Args:
        endpoint: Address of the service.
        acknowledges: Whether the source allows Azure to take the machine once all is saved. Set
            False if other jobs use the machine, as on a Kubernetes node.
        seconds: Timeout of one request, after the first.
    """

    name = "azure"
    every_seconds = 1.0

    def __init__(
        self, endpoint: str = METADATA_ENDPOINT, *, acknowledges: bool = False, seconds: float = 5.0
    ) -> None:
        self._endpoint = endpoint
        self._acknowledges = acknowledges
        self._seconds = seconds
        self._machine: str | None = None
        self._is_on = False
        self._event_ids: list[str] = []

    def look(self) -> Notice | None:
        """Return the earliest event of this machine.

        Raises:
            SourceLost: The service does not answer.
            SourceGarbled: The answer is invalid.
        """
        if self._machine is None:
            self._machine = self._find_name()
        seconds = self._seconds if self._is_on else _FIRST_SECONDS
        answer = http_get(
            MetadataRequest(self._endpoint + _EVENTS, headers=_AZURE_HEADERS, seconds=seconds)
        )
        if not answer.is_there:
            return None
        events = answer.document.get("Events")
        if not isinstance(events, list):
            raise SourceGarbled(f"there is no list of events: {answer.text[:60]!r}")
        self._is_on = True
        own_events = [
            event for event in events if isinstance(event, dict) and self._is_of_this_machine(event)
        ]
        self._event_ids = [str(event["EventId"]) for event in own_events if event.get("EventId")]
        notices = [_notice(event) for event in own_events]
        return min(notices, key=lambda notice: notice.at_seconds or 0.0, default=None)

    def acknowledge(self) -> None:
        """Acknowledge the events to Azure if the option is on.

        Raises:
            SourceLost: The request failed.
        """
        if not self._acknowledges or not self._event_ids:
            return
        body = json.dumps(
            {"StartRequests": [{"EventId": event} for event in self._event_ids]}
        ).encode()
        answer = http_get(
            MetadataRequest(self._endpoint + _EVENTS, "POST", _AZURE_HEADERS, body, self._seconds)
        )
        if not answer.is_there:
            raise SourceLost("the events to acknowledge no longer exist")

    def close(self) -> None:
        """Do nothing: the source has no resources."""

    def _find_name(self) -> str | None:
        """Return the machine's name, because machines of a set see each other's events."""
        request = MetadataRequest(
            self._endpoint + _NAME, headers=_AZURE_HEADERS, seconds=self._seconds
        )
        try:
            answer = http_get(request)
            name = answer.text if answer.is_there else ""
        except (SourceLost, SourceGarbled):
            return None
        return name

    def _is_of_this_machine(self, event: Mapping[str, Any]) -> bool:
        resources = event.get("Resources")
        # Without a name to compare, a needless stop costs less than a missed one.
        names_this_machine = (
            not self._machine or not isinstance(resources, list) or self._machine in resources
        )
        return names_this_machine and event.get("EventType") in _ENDINGS


def _notice(event: Mapping[str, Any]) -> Notice:
    reason = f"azure: {str(event['EventType']).lower()}"
    try:
        # `NotBefore` is empty once the event has started.
        return Notice(reason, parsedate_to_datetime(str(event["NotBefore"])).timestamp())
    except (KeyError, ValueError, TypeError):
        return Notice(reason)


GCP_ENDPOINT = "http://metadata.google.internal"
PREEMPTED_SECONDS = 30.0
"""Time from the announcement of a preemption until the machine is off."""
_MAINTENANCE_SECONDS = 60.0
_INSTANCE = "/computeMetadata/v1/instance/"
_GCP_HEADERS = {"Metadata-Flavor": "Google"}
_MARGIN_SECONDS = 5.0


class GcpSource:
    """Source that waits for a change of one value of the metadata server.

    Args:
        clock: Clock for the time of a change.
        value: ``preempted`` or ``maintenance-event``.
        endpoint: Address of the server.
        wait_seconds: Length of one long poll.
    """

    # The request itself waits.
    every_seconds = 0.2

    def __init__(
        self,
        clock: Clock,
        value: str,
        endpoint: str = GCP_ENDPOINT,
        *,
        wait_seconds: float = 60.0,
    ) -> None:
        self._clock = clock
        self._value = value
        self._endpoint = endpoint
        self._wait_seconds = wait_seconds
        self._etag = ""
        self._last_notice: Notice | None = None

    @property
    def name(self) -> str:
        """Name of the source with its value."""
        return f"gcp {self._value}"

    def look(self) -> Notice | None:
        """Return the notice for the value, after a change or the end of the poll.

        Raises:
            SourceLost: The server does not answer.
            SourceGarbled: Another server answered, or the value is unknown.
        """
        answer = self._ask()
        if not answer.is_there:
            return None
        if answer.headers.get("metadata-flavor") != "Google":
            self._etag = ""
            raise SourceGarbled("the answer did not come from the metadata server")
        self._etag = answer.headers.get("etag", "")
        notice = self._notice_for(answer.text)
        if notice is None or self._last_notice is None or notice.reason != self._last_notice.reason:
            self._last_notice = notice
        # A repeated value is the same notice, and not a new one with another deadline.
        return self._last_notice

    def acknowledge(self) -> None:
        """Do nothing: Compute Engine has no acknowledgement."""

    def close(self) -> None:
        """Do nothing: the source has no resources."""

    def _ask(self) -> MetadataResponse:
        query, seconds = {}, 2.0
        # The first request reads the current value. Later requests wait for a change.
        if self._etag:
            query = {"wait_for_change": "true", "last_etag": self._etag}
            query["timeout_sec"] = str(max(1, round(self._wait_seconds)))
            seconds = self._wait_seconds + _MARGIN_SECONDS
        url = f"{self._endpoint}{_INSTANCE}{self._value}{'?' if query else ''}{urlencode(query)}"
        try:
            return http_get(MetadataRequest(url, headers=_GCP_HEADERS, seconds=seconds))
        except SourceLost:
            self._etag = ""
            raise

    def _notice_for(self, text: str) -> Notice | None:
        now_seconds = unix_seconds(self._clock)
        match self._value, text:
            case (_, "FALSE" | "NONE" | "MIGRATE_ON_HOST_MAINTENANCE"):
                # A migrated machine continues to run.
                return None
            case ("preempted", "TRUE"):
                return Notice("gcp: preempted", now_seconds + PREEMPTED_SECONDS)
            case ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"):
                return Notice("gcp: host maintenance", now_seconds + _MAINTENANCE_SECONDS)
        raise SourceGarbled(f"`{self._value}` is {text[:40]!r}, an unknown value")
