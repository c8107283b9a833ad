"""What goes along with a body, so that a server refuses any other one.

Everywhere that is its SHA-256, which is signed. Over https a CRC-32C does as well where the server
holds it against what arrived, and costs both sides a tenth: TLS keeps others from changing the
body, and the checksum, itself signed, finds what broke behind the end of TLS. Amazon describes
both in "Checking object integrity" and "Unsigned payload" of its S3 documentation. A server that
knows the checksum says it again in its answer; one that does not passes over it.
"""

from __future__ import annotations

import base64
import threading
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING

try:
    from crc32c import crc32c
except ImportError:  # of the extra `fast`; without it bodies are signed
    crc32c = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Mapping

SUM_HEADER = "x-amz-checksum-crc32c"
ALGORITHM_HEADER = "x-amz-checksum-algorithm"
ALGORITHM = "CRC32C"
"""Both sides take it with an instruction; of CRC-32 and CRC-64 Ceph makes more than of SHA-256."""
# Every client of Amazon's own says it too, and without it Ceph passes over the checksum.
_SAID_HEADER = "x-amz-sdk-checksum-algorithm"
_UNSIGNED = "UNSIGNED-PAYLOAD"
_TRIALS_MAX = 3


@dataclass(frozen=True, slots=True)
class Proof:
    """How a server knows a body.

    Attributes:
        digest: SHA-256 in hexadecimal digits, or the word for none.
        headers: to sign besides.
    """

    digest: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def sum(self) -> str:
        """The checksum, as a server says it again; empty if there is none."""
        return self.headers.get(SUM_HEADER, "")


def signed(body: memoryview) -> Proof:
    """Return the proof that every server takes."""
    return Proof(sha256(body).hexdigest())


def summed(body: memoryview) -> Proof:
    """Return the proof for a server that holds a checksum against what arrived, over https."""
    value = base64.b64encode(crc32c(body).to_bytes(4)).decode("ascii")
    return Proof(_UNSIGNED, {SUM_HEADER: value, _SAID_HEADER: ALGORITHM})


class Sums:
    """Whether a server holds checksums against bodies; one body finds out, the others wait not.

    A trial without an answer says nothing. But what comes between may answer a checksum it does
    not know with an error that passes for an outage, so the body after such a trial is signed,
    and after three of them all are.

    Args:
        is_asked: false where only a signed SHA-256 will do.
    """

    def __init__(self, *, is_asked: bool) -> None:
        self._is_known, self._holds = not is_asked or crc32c is None, False
        self._is_tried = self._owes_signature = False
        self._unanswered = 0
        self._lock = threading.Lock()

    def begin(self) -> bool:
        """Say whether the next body goes with a checksum; then ``end`` is to be told."""
        with self._lock:
            if self._is_known:
                return self._holds
            if self._is_tried or self._owes_signature:
                self._owes_signature = self._owes_signature and self._is_tried
                return False
            self._is_tried = True
            return True

    def end(self, *, holds: bool | None) -> None:
        """Take note of what was seen.

        Args:
            holds: whether the server said the checksum again; None if nobody knows.
        """
        with self._lock:
            self._is_tried = False
            if holds is None:
                self._owes_signature = True
                self._unanswered += 1
                holds = False if self._unanswered >= _TRIALS_MAX and not self._is_known else None
            if holds is not None:
                # One server of several that holds none decides for all.
                self._holds = holds and (self._holds or not self._is_known)
                self._is_known = True
