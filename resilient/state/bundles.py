"""How many files a rank's share of a part becomes, and where it is cut: several when it is large.

Several files are written and read at once, and what repairs a lost one costs a part of them all.
The cuts fall between regions, so that the files say nothing about the tensors that one file would
not say; only a region that is larger than any file should be is cut itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.state.shares import cut

if TYPE_CHECKING:
    from resilient.state.shares import Piece

FILE_BYTES_MAX = 256 << 20
"""A file is larger only if a tensor has rows that are."""
FILE_BYTES_MIN = 16 << 20
"""A share is not cut into files that are smaller: each costs the store its own requests."""
FILES_MIN = 4
"""A share that is large enough becomes at least so many files."""


def bundled(share: list[Piece]) -> list[list[Piece]]:
    """Return a share as files: consecutive pieces, of bytes as equal as the pieces allow.

    The same shapes always give the same files, whatever is in the tensors.

    Args:
        share: what one rank writes of one part.
    """
    pieces = [part for piece in share for part in _cut_if_huge(piece)]
    left_bytes = sum(piece.size_bytes for piece in pieces)
    files = _files_for(left_bytes, FILES_MIN)
    bundles: list[list[Piece]] = [[]] if pieces else []
    goal_bytes, filled_bytes = left_bytes / files, 0
    for piece in pieces:
        if bundles[-1] and filled_bytes + piece.size_bytes / 2 > goal_bytes:
            # What is left is shared out anew, so a large piece moves all later cuts.
            left_bytes -= filled_bytes
            goal_bytes, filled_bytes = left_bytes / max(files - len(bundles), 1), 0
            bundles.append([])
        bundles[-1].append(piece)
        filled_bytes += piece.size_bytes
    return bundles


def _cut_if_huge(piece: Piece) -> list[Piece]:
    count = -(-piece.size_bytes // FILE_BYTES_MAX)
    return cut(piece, count) if count > 1 else [piece]


def _files_for(size_bytes: int, files_min: int) -> int:
    """Return how many files hold so many bytes."""
    most = -(-size_bytes // FILE_BYTES_MAX)
    return max(most, min(files_min, size_bytes // FILE_BYTES_MIN), 1)
