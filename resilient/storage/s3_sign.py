"""Requests to S3 that we send over connections of our own: AWS Signature Version 4.

The steps are those of "Signature Calculations for the Authorization Header" in Amazon's S3 API
reference.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from resilient.storage.s3_options import S3Options

_ALGORITHM = "AWS4-HMAC-SHA256"
EMPTY = hashlib.sha256(b"").hexdigest()
"""Digest of no body."""
NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who signs, and for which region. Shown, it tells nothing."""

    key: str = field(repr=False)
    secret: str = field(repr=False)
    token: str = field(repr=False)
    region: str


def known_credentials(options: S3Options) -> Credentials | None:
    """Return the credentials that were given or stand in the standard variables, else None."""
    given = (options.key, options.secret, options.token)
    if not options.key:
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
        given = tuple(os.environ.get(name, "") for name in names)  # type: ignore[assignment]
    key, secret, token = given
    return Credentials(key, secret, token, region_of(options)) if key and secret else None


def region_of(options: S3Options) -> str:
    """Return the region that was given or stands in the standard variables."""
    variables = (os.environ.get(name) for name in ("AWS_REGION", "AWS_DEFAULT_REGION"))
    return options.region or next(filter(None, variables), "us-east-1")


def query_of(arguments: Mapping[str, str]) -> str:
    """Return a query in the one spelling that is signed: sorted, all but ``-._~`` quoted."""
    pairs = sorted(
        (quote(name, safe="-._~"), quote(arguments[name], safe="-._~")) for name in arguments
    )
    return "&".join(f"{name}={value}" for name, value in pairs)


def signed_headers(
    method: str,
    url: str,
    who: Credentials,
    now: datetime,
    body_digest: str = EMPTY,
    more: Mapping[str, str] = NOTHING,
) -> dict[str, str]:
    """Return the headers with which ``url`` may be asked for.

    Args:
        method: of HTTP.
        url: with a quoted path and the query of ``query_of``.
        who: signs.
        now: the present time, UTC; servers accept 15 minutes of difference.
        body_digest: SHA-256 of the body, in hexadecimal digits; the server refuses another body.
        more: headers that are signed as well; names in lower case.
    """
    parts = urlsplit(url)
    stamp = now.strftime("%Y%m%dT%H%M%SZ")
    headers = {
        "host": parts.netloc,
        "x-amz-content-sha256": body_digest,
        "x-amz-date": stamp,
        **more,
    }
    if who.token:
        headers["x-amz-security-token"] = who.token
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    request = "\n".join((method, parts.path or "/", parts.query, lines, names, body_digest))
    scope = f"{stamp[:8]}/{who.region}/s3/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    signature = hmac.new(
        _signing_key(who, stamp[:8]),
        f"{_ALGORITHM}\n{stamp}\n{scope}\n{digest}".encode(),
        hashlib.sha256,
    ).hexdigest()
    authorization = (
        f"{_ALGORITHM} Credential={who.key}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return {**headers, "authorization": authorization}


def _signing_key(who: Credentials, date: str) -> bytes:
    key = f"AWS4{who.secret}".encode()
    for step in (date, who.region, "s3", "aws4_request"):
        key = hmac.new(key, step.encode(), hashlib.sha256).digest()
    return key
