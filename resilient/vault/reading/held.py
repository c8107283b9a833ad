"""A file of a checkpoint as it lies in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resilient.format.digest import FileDigest

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Held:
    """One file of a checkpoint in shared memory, with what its bytes were when it was stored.

    Attributes:
        path: the shared file.
        proof: length and digests of the content.
    """

    path: str
    proof: FileDigest

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able value."""
        proof = self.proof
        return {"path": self.path, "proof": [proof.size_bytes, proof.digest, list(proof.chunks)]}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Held:
        """Return what ``to_json`` described."""
        size_bytes, digest, chunks = value["proof"]
        return Held(str(value["path"]), FileDigest(int(size_bytes), str(digest), tuple(chunks)))
