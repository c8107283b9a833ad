"""From where a piece of a tensor is said to be to where its first element lies."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from resilient.layouts.archives import data_start, open_archive
from resilient.layouts.pickled import TensorRef
from resilient.layouts.values import Form, Unreadable

if TYPE_CHECKING:
    from resilient.layouts.values import Piece
    from resilient.storage.folder import Folder, Listing


def settled(folder: Folder, listing: Listing, piece: Piece, dtype: str) -> Piece:
    """Return the same piece with its ``start`` at bytes of elements.

    Reads the header of a zip's member, of a slice of a distributed checkpoint its directory as
    well; nothing where the elements begin at once.

    Args:
        folder: where it is.
        listing: what is there.
        piece: of a tensor.
        dtype: of this tensor, as a name of :data:`resilient.layouts.values.ITEM_BITS`.

    Raises:
        Unreadable: the file is damaged, or says something else than its index.
        StoreError: it could not be read.
    """
    if piece.form is Form.ARCHIVE:
        piece = _inside(folder, listing, piece, dtype)
    if piece.form is Form.MEMBER:
        start = data_start(folder, piece.file, piece.start)
        piece = replace(piece, start=start, form=Form.BYTES)
    if piece.start < 0 or piece.start + piece.size_bytes > listing.sizes.get(piece.file, 0):
        raise Unreadable(f"`{piece.file}` ends too early")
    return piece


def _inside(folder: Folder, listing: Listing, piece: Piece, dtype: str) -> Piece:
    archive = open_archive(folder, listing, piece.file, piece.start, piece.size_bytes)
    found = archive.value
    if not isinstance(found, TensorRef):
        raise Unreadable(f"a slice of `{piece.file}` holds no tensor")
    if found.shape != piece.region.lengths or found.dtype != dtype:
        raise Unreadable(f"a slice of `{piece.file}` is not what the index says")
    pieces = archive.pieces(found)
    if not pieces:
        raise Unreadable(f"a slice of `{piece.file}` lacks its bytes")
    return replace(pieces[0], region=piece.region)
