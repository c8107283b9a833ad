"""Block-wise reader of a tensor that is stored in several pieces."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from resilient.errors import KeyNotFound
from resilient.format.regions import Region, covers, flat_regions, intersect, row_strides, spans
from resilient.layouts.model import ITEM_BITS, Unreadable
from resilient.layouts.torch_zip import resolve_pieces

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from resilient.layouts.model import Piece, Tensor
    from resilient.storage.folder import DirectoryListing, Folder

BLOCK_ELEMENTS = 1 << 20
"""Number of elements per block of a tensor, 4 MiB of F32."""
AHEAD_BYTES = 2 << 20
_KEPT_MAX = 16
_HOLE_BYTES = 256 << 10
_STRIDED_BYTES_MAX = 64 << 20
"""Largest piece that is not row-major; such a piece is read at once."""
_BITS = 8
_PIECES_MAX = 10_000
_EXPANDED_MAX = 64
"""Largest number of repetitions of the same bytes in a view; more count as hostile."""


class ReadAhead:
    """Folder that serves small reads from cached blocks, for use by one thread.

    Tensors are adjacent in a file. Separate reads would need thousands of requests to a store.

    Args:
        folder: Folder of the files.
        listing: Listing with the sizes of the files.
    """

    def __init__(self, folder: Folder, listing: DirectoryListing) -> None:
        self.url = folder.url
        self._folder, self._listing = folder, listing
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def list(self) -> DirectoryListing:
        """Return the listing from the start of the read."""
        return self._listing

    def read(self, name: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes of a file from ``start``; fewer only at its end."""
        length = max(0, min(length, self._listing.sizes.get(name, 0) - start))
        if length >= AHEAD_BYTES:
            return self._folder.read(name, start, length)
        first, last = start // AHEAD_BYTES, (start + max(length, 1) - 1) // AHEAD_BYTES
        data = b"".join(self._block(name, number) for number in range(first, last + 1))
        offset = start - first * AHEAD_BYTES
        return data[offset : offset + length]

    def _block(self, name: str, number: int) -> bytes:
        key = (name, number)
        if key not in self._blocks:
            self._blocks[key] = self._folder.read(name, number * AHEAD_BYTES, AHEAD_BYTES)
            if len(self._blocks) > _KEPT_MAX:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(key)
        return self._blocks[key]


class Elements:
    """Elements of one tensor in row-major order, from any pieces.

    Args:
        folder: Folder of the files.
        listing: Sizes of the files.
        tensor: The tensor to read.

    Raises:
        Unreadable: The pieces do not cover the tensor, or its tool stores it in another form.
    """

    def __init__(self, folder: Folder, listing: DirectoryListing, tensor: Tensor) -> None:
        bits = ITEM_BITS.get(tensor.dtype, 0)
        if not tensor.pieces:
            raise Unreadable("the headers do not show where its bytes are")
        if not bits:
            raise Unreadable(f"unknown dtype: {tensor.dtype[:40]}")
        if bits < _BITS:
            raise Unreadable(f"{tensor.dtype}: several elements share a byte")
        if len(tensor.pieces) > _PIECES_MAX:
            raise Unreadable(f"{len(tensor.pieces)} pieces")
        stored_bytes = sum(listing.sizes.get(file, 0) for file in tensor.files)
        if tensor.size_bytes > _EXPANDED_MAX * max(stored_bytes, AHEAD_BYTES):
            raise Unreadable("it has more elements than its files have bytes")
        if not covers(tensor.shape, [piece.region for piece in tensor.pieces]):
            raise Unreadable("its pieces do not cover it")
        self._folder, self._listing, self._tensor = folder, listing, tensor
        self._pieces: dict[int, Piece] = {}
        self._strided: dict[int, NDArray[np.uint8]] = {}
        self.item_bytes = bits // _BITS

    def read(self, start: int, count: int) -> NDArray[np.uint8]:
        """Return ``count`` elements from ``start`` as little-endian bytes, one row per element.

        Raises:
            Unreadable: A file is damaged or ends too early.
            StoreError: A file could not be read.
        """
        values = np.empty((count, self.item_bytes), np.uint8)
        place = 0
        for box in flat_regions(self._tensor.shape, start, count):
            room = values[place : place + box.size].reshape(*box.lengths, self.item_bytes)
            for number, piece in enumerate(self._tensor.pieces):
                overlap = intersect(piece.region, box)
                if overlap is not None:
                    self._fill(room, box, number, overlap)
            place += box.size
        return values

    def _fill(self, room: NDArray[np.uint8], box: Region, number: int, shared: Region) -> None:
        """Copy the part of a piece that is in a box to its place."""
        piece = self._pieces.get(number)
        if piece is None:
            unresolved = self._tensor.pieces[number]
            piece = resolve_pieces(self._folder, self._listing, unresolved, self._tensor.dtype)
            self._pieces[number] = piece
        if not _is_row_major(piece):
            room[_within(box, shared)] = self._whole(number, piece)[_within(piece.region, shared)]
            return
        hole = max(1, _HOLE_BYTES // self.item_bytes)
        for part, first, reach in spans(piece.region, shared, hole):
            data = self._bytes(piece, piece.first + first, reach)
            strides = (*row_strides(piece.region.lengths), 1)
            room[_within(box, part)] = self._shaped(data, piece, part.lengths, strides[:-1])

    def _whole(self, number: int, piece: Piece) -> NDArray[np.uint8]:
        """Return a piece that is not row-major, and cache it in memory."""
        if number not in self._strided:
            strides = piece.strides or ()
            pairs = zip(piece.region.lengths, strides, strict=True)
            reach = 1 + sum((length - 1) * stride for length, stride in pairs)
            if reach * self.item_bytes > _STRIDED_BYTES_MAX:
                raise Unreadable(f"it is not laid out row-major, over {reach} elements")
            data = self._bytes(piece, piece.first, reach)
            self._strided[number] = self._shaped(data, piece, piece.region.lengths, strides)
        return self._strided[number]

    def _bytes(self, piece: Piece, first: int, reach: int) -> bytes:
        at, length = first * self.item_bytes, reach * self.item_bytes
        if at + length > piece.size_bytes:
            raise Unreadable(f"`{piece.file}` has fewer bytes than the tensor needs")
        try:
            data = self._folder.read(piece.file, piece.start + at, length)
        except KeyNotFound as error:
            raise Unreadable(f"`{piece.file}` is missing") from error
        if len(data) != length:
            raise Unreadable(f"`{piece.file}` ends too early")
        return data

    def _shaped(
        self, data: bytes, piece: Piece, lengths: Sequence[int], strides: Sequence[int]
    ) -> NDArray[np.uint8]:
        """Return bytes as an array of elements with strides in elements."""
        flat = np.frombuffer(data, np.uint8)
        steps = (*(stride * self.item_bytes for stride in strides), 1)
        shape = (*lengths, self.item_bytes)
        view = np.lib.stride_tricks.as_strided(flat, shape, steps, writeable=False)
        return view[..., ::-1] if piece.is_swapped else view


def _is_row_major(piece: Piece) -> bool:
    """Return True if the elements of a piece are adjacent as in a contiguous tensor."""
    lengths, strides = piece.region.lengths, piece.strides
    if strides is None:
        return True
    rows = zip(lengths, strides, row_strides(lengths), strict=True)
    return all(length <= 1 or stride == row for length, stride, row in rows)


def _within(outer: Region, inner: Region) -> tuple[slice, ...]:
    """Return the position of a box within another."""
    return tuple(
        slice(offset - base, offset - base + length)
        for offset, base, length in zip(inner.offsets, outer.offsets, inner.lengths, strict=True)
    )
