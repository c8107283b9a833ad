"""EC2: spot interruptions and rebalance recommendations, from the instance metadata service.

Protocol: a token by ``PUT /latest/api/token`` (IMDSv2), then ``GET`` with it. An address that
does not exist yet answers 404. Amazon EC2 User Guide, "Spot Instance interruption notices" and
"Use the Instance Metadata Service".

The answer to the ``PUT`` carries an IP hop limit, 1 by default, so from inside a container it
may never arrive. Then the service is asked without a token, which works where IMDSv1 is allowed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.agent.notices.asking import Answer, Request, ask
from resilient.agent.notices.notice import Notice, SourceGarbled, SourceLost, moment_of

if TYPE_CHECKING:
    from resilient.clock import Clock

ENDPOINT = "http://169.254.169.254"
_TOKEN_TTL_SECONDS = 21_600
_RENEW_SECONDS = _TOKEN_TTL_SECONDS / 2
_ACTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
_OK, _BAD_REQUEST, _UNAUTHORIZED, _FORBIDDEN = 200, 400, 401, 403


class AwsSource:
    """Asks the instance metadata service.

    Args:
        clock: tells the age of the token.
        endpoint: of the service.
        stops_on_rebalance: whether a recommendation to move is a reason to stop, and not only
            an advice that is told.
        seconds: how long one request may take.
    """

    name = "aws"
    every_seconds = 5.0

    def __init__(
        self,
        clock: Clock,
        endpoint: str = ENDPOINT,
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
        """Return an interruption that was announced, else a recommendation, else None.

        Raises:
            SourceLost: the service cannot be asked; for a hop limit it says what to do.
            SourceGarbled: the answer makes no sense.
        """
        action = self._get(_ACTION)
        if action.is_there:
            return _interruption(action)
        advice = self._get(_REBALANCE)
        if advice.is_there:
            return Notice("aws: rebalance recommended", None, not self._stops_on_rebalance)
        return None

    def acknowledge(self) -> None:
        """Do nothing: EC2 does not ask."""

    def close(self) -> None:
        """Hold nothing, so let go of nothing."""

    def _get(self, path: str) -> Answer:
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

    def _get_once(self, path: str) -> Answer:
        token = self._renewed()
        headers = {"X-aws-ec2-metadata-token": token} if token else {}
        return ask(Request(self._endpoint + path, headers=headers, seconds=self._seconds))

    def _renewed(self) -> str:
        """Return a token that is still good, or nothing where none can be had."""
        now_seconds = self._clock.monotonic_seconds()
        if self._token and now_seconds - self._token_at_seconds < _RENEW_SECONDS:
            return self._token
        self._token, self._why_no_token = "", ""
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_SECONDS)}
        url = f"{self._endpoint}/latest/api/token"
        try:
            answer = ask(Request(url, "PUT", headers, b"", self._seconds))
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


def _interruption(answer: Answer) -> Notice:
    document = answer.document
    action = document.get("action")
    if action not in ("terminate", "stop", "hibernate"):
        raise SourceGarbled(f"an instance action that nobody knows: {str(action)[:40]!r}")
    try:
        return Notice(f"aws: spot {action}", moment_of(str(document.get("time"))))
    except SourceGarbled:
        # The action alone is clear: it comes, and nobody says when.
        return Notice(f"aws: spot {action}")
