"""Torch.save zip files by ranges.

Files of a folder as what ``zipfile`` can read: ranges on demand, bounded, with a memory.

Files that torch has saved: a zip of one pickle and the bytes of tensors, read by ranges.

Source of the layout: ``torch.serialization`` and ``caffe2/serialize``. All members are stored as
they are; one that is compressed was not written by torch, and is refused, for a few bytes of it
could become more than any memory. Files of torch before 1.6 are bare pickles in a row.

From where a piece of a tensor is said to be to where its first element lies.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from resilient.errors import KeyNotFound
from resilient.format.regions import whole as all_of
from resilient.layouts.json_files import require_no_pointer
from resilient.layouts.model import ITEM_BITS, OTHER, Piece, StorageFormat, Tensor, Unreadable
from resilient.layouts.pickle_names import rebuild
from resilient.layouts.pickle_reader import (
    BYTES_MAX,
    PickledGlobal,
    StorageRef,
    TensorRef,
    leaves,
    read_pickle,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.storage.folder import DirectoryListing, Folder

READ_MAX = 16 << 20
"""One answer; the directory of a zip with 100,000 members has 10 MB."""
_AHEAD_BYTES = 64 << 10


class RangeReader(io.RawIOBase):
    """A part of a file, for reading; remembers the last bytes it asked for.

    Args:
        folder: where the file is.
        name: its name.
        start: where the part begins in it.
        size_bytes: how long the part is.
    """

    def __init__(self, folder: Folder, name: str, start: int, size_bytes: int) -> None:
        super().__init__()
        self._folder, self._name = folder, name
        self._start, self._size = start, size_bytes
        self._at = 0
        self._kept, self._kept_at = b"", 0

    def readable(self) -> bool:
        """Say yes."""
        return True

    def seekable(self) -> bool:
        """Say yes."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError("before the beginning")
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Return the next ``size`` bytes or all that are left, of more than 16 MiB the first.

        ``zipfile`` asks again for the rest of a member. A directory it takes in one piece, so one
        that is larger counts as cut short.
        """
        left = max(0, self._size - self._at)
        size = min(left if size < 0 else size, left, READ_MAX)
        if not self._at >= self._kept_at or self._at + size > self._kept_at + len(self._kept):
            # From the tail on backwards is how zips are read, so what is near the end comes whole.
            begin = self._at if left > _AHEAD_BYTES else max(0, self._size - _AHEAD_BYTES)
            length = min(max(size, _AHEAD_BYTES), self._size - begin)
            length = max(length, self._at + size - begin)
            self._kept = self._folder.read(self._name, self._start + begin, length)
            self._kept_at = begin
        offset = self._at - self._kept_at
        found = self._kept[offset : offset + size]
        self._at += len(found)
        return found


_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_LOCAL_MAGIC = b"PK\x03\x04"
_LEGACY_PROTO_BYTES = 2
_LEGACY_LENGTH_BYTES = 8
_LEGACY_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_TAR, _TAR_AT = b"ustar", 257
_NUMBERS = {
    "F64": "d", "F32": "f", "F16": "e", "I64": "q", "I32": "i", "I16": "h", "I8": "b", "U8": "B",
}  # fmt: skip
BROKEN = (
    zipfile.BadZipFile,
    ValueError,
    OverflowError,
    NotImplementedError,
    struct.error,
    EOFError,
)


@dataclass(frozen=True, slots=True)
class Archive:
    """What is in one file of torch's.

    Attributes:
        value: its object; tensors are references.
        names: what the pickle would import.
        members: place and size of every member by its name after the root folder.
        byteorder: of the numbers in it.
        base: where it begins in the file.
        form: what is at a member's place.
        sums: the checksum of every member, zero where torch was told to make none.
    """

    folder: Folder
    name: str
    value: Any
    names: frozenset[PickledGlobal]
    members: Mapping[str, tuple[int, int]]
    byteorder: str = "little"
    base: int = 0
    form: StorageFormat = StorageFormat.MEMBER
    sums: Mapping[str, int] = field(default_factory=dict)

    def tensors(self, part: str = OTHER) -> tuple[Tensor, ...]:
        """Return every tensor under its path with dots.

        Raises:
            Unreadable: there are more values than bounds allow.
        """
        return tensors_in(self, self.value, part)

    def pieces(self, tensor: TensorRef) -> tuple[Piece, ...]:
        """Return where a tensor's bytes are, in one piece; none if they are not in here."""
        place = self.members.get(f"data/{tensor.storage.key}") if tensor.storage else None
        if place is None:
            return ()
        piece = Piece(
            all_of(tensor.shape),
            self.name,
            self.base + place[0],
            place[1],
            self.form,
            tensor.offset,
            tensor.strides,
            self.byteorder == "big",
        )
        return (piece,)

    def number(self, value: Any) -> float | int | None:
        """Return a number, or that of a tensor with one element; None of anything else.

        Raises:
            StoreError: it could not be read.
        """
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
        return self._element(value) if isinstance(value, TensorRef) else None

    def head(self, tensor: TensorRef, count: int) -> bytes:
        """Return the first bytes of a tensor's, none of one whose bytes are not here.

        Raises:
            StoreError: it could not be read.
        """
        place = self.members.get(f"data/{tensor.storage.key}") if tensor.storage else None
        at = tensor.offset * (ITEM_BITS.get(tensor.dtype, 8) // 8)
        if place is None or at + count > place[1]:
            return b""
        start = self.base + place[0]
        if self.form is StorageFormat.MEMBER:
            start = data_start(self.folder, self.name, start)
        return self.folder.read(self.name, start + at, count)

    def _element(self, tensor: TensorRef) -> float | int | None:
        """Return the one element of a tensor, None when it has more or its bytes are not here."""
        if tensor.dtype not in _NUMBERS or any(one != 1 for one in tensor.shape):
            return None
        item_bytes = ITEM_BITS[tensor.dtype] // 8
        data = self.head(tensor, item_bytes)
        if len(data) != item_bytes:
            return None
        order = ">" if self.byteorder == "big" else "<"
        found: float | int = struct.unpack(order + _NUMBERS[tensor.dtype], data)[0]
        return found


def tensors_in(archive: Archive, value: Any, part: str) -> tuple[Tensor, ...]:
    """Return every tensor that a value of an archive refers to, by its path with dots between.

    Raises:
        Unreadable: there are more values than bounds allow.
    """
    return tuple(
        Tensor(
            ".".join(map(_word, path)),
            part,
            one.dtype,
            one.shape,
            (archive.name,),
            archive.pieces(one),
        )
        for path, one in leaves(value)
        if isinstance(one, TensorRef)
    )


def _word(key: Any) -> str:
    return key if isinstance(key, str) else str(key)[:80] if isinstance(key, int) else "?"


def open_archive(
    folder: Folder,
    listing: DirectoryListing,
    name: str,
    start: int = 0,
    size_bytes: int | None = None,
) -> Archive:
    """Return what is in a file of torch's, or in a part of a file that is one.

    Reads the zip's directory and the pickle, whose checksum is proved; no byte of tensors.

    Args:
        folder: where it is.
        listing: what is there.
        name: the file.
        start: where the part begins.
        size_bytes: how long it is; the whole file if not given.

    Raises:
        Unreadable: it is no such file, or damaged, or hostile.
        StoreError: it could not be read.
    """
    if name not in listing.sizes:
        raise Unreadable(listing.why_unread(name))
    whole = listing.sizes[name]
    size_bytes = whole - start if size_bytes is None else size_bytes
    if start < 0 or size_bytes <= 0 or start + size_bytes > whole:
        raise Unreadable("it is empty" if whole == 0 else "it ends too early")
    try:
        with zipfile.ZipFile(RangeReader(folder, name, start, size_bytes)) as opened:
            found = opened.infolist()
    except (*BROKEN, KeyNotFound) as error:
        return _legacy(folder, name, start, size_bytes, error)
    return _archive(folder, name, start, found)


def _archive(folder: Folder, name: str, start: int, found: list[zipfile.ZipInfo]) -> Archive:
    pickles = [one for one in found if one.filename.rpartition("/")[2] == "data.pkl"]
    if len(pickles) != 1:
        raise Unreadable(f"a zip with {len(pickles)} pickles is no file of torch's")
    stored = [one for one in found if one.compress_type == zipfile.ZIP_STORED]
    if any(is_contradictory(one) for one in stored):
        raise Unreadable("the directory of the zip contradicts itself")
    root = pickles[0].filename.removesuffix("data.pkl")
    members = {
        one.filename.removeprefix(root): (one.header_offset, one.file_size) for one in stored
    }
    pickled = read_pickle(_member(folder, name, start, pickles[0]), rebuild)
    order = next((one for one in found if one.filename == f"{root}byteorder"), None)
    byteorder = "little" if order is None else _member(folder, name, start, order).decode("latin1")
    sums = {one.filename.removeprefix(root): one.CRC for one in stored}
    return Archive(folder, name, pickled.value, pickled.names, members, byteorder, start, sums=sums)


def is_contradictory(member: zipfile.ZipInfo) -> bool:
    """Say whether a directory gives two lengths to what lies there as it is."""
    is_stored = member.compress_type == zipfile.ZIP_STORED
    return is_stored and member.compress_size != member.file_size


def _member(folder: Folder, name: str, start: int, info: zipfile.ZipInfo) -> bytes:
    """Return a small member, proved by its checksum if it has one."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise Unreadable(f"`{info.filename}` in it is compressed, which torch never does")
    if info.file_size > BYTES_MAX:
        raise Unreadable(f"`{info.filename}` in it has {info.file_size} bytes")
    at = data_start(folder, name, start + info.header_offset)
    data = folder.read(name, at, info.file_size)
    # Checksums can be switched off in torch; the field is zero then.
    if len(data) != info.file_size or (info.CRC and zlib.crc32(data) != info.CRC):
        raise Unreadable(f"the checksum of `{info.filename}` in it is wrong")
    return data


def data_start(folder: Folder, name: str, header_at: int) -> int:
    """Return where the bytes of a zip's member begin, of which its own header has the last word."""
    head = folder.read(name, header_at, _LOCAL_HEADER.size)
    if len(head) != _LOCAL_HEADER.size or not head.startswith(_LOCAL_MAGIC):
        raise Unreadable("a member of the zip is not where its directory says")
    *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(head)
    return header_at + _LOCAL_HEADER.size + int(name_bytes) + int(extra_bytes)


def _legacy(folder: Folder, name: str, start: int, size_bytes: int, error: Exception) -> Archive:
    """Return what is in a file of torch before 1.6: magic, version and system, then the object."""
    head = folder.read(name, start, min(size_bytes, BYTES_MAX))
    at = head.find(_LEGACY_MAGIC, 0, 64)
    if head[_TAR_AT : _TAR_AT + len(_TAR)] == _TAR:
        raise Unreadable("a tar file, as torch before 0.1.10 wrote them: `torch.save` it anew")
    if at < _LEGACY_PROTO_BYTES:
        require_no_pointer(folder, name)
        raise Unreadable(f"not a file of torch's: {str(error)[:120]}") from error
    stream = io.BytesIO(head)
    stream.seek(at - _LEGACY_PROTO_BYTES)
    for _ in ("magic", "version", "system"):
        read_pickle(stream)
    pickled = read_pickle(stream, rebuild)
    members = _legacy_members(pickled.value, read_pickle(stream).value, stream.tell())
    order = "little"
    return Archive(
        folder, name, pickled.value, pickled.names, members, order, start, StorageFormat.BYTES
    )


def _legacy_members(value: Any, keys: Any, at: int) -> dict[str, tuple[int, int]]:
    """Return where each storage is: after their keys in order, each behind its length."""
    sizes: dict[str, int] = {}
    for _, one in leaves(value):
        held = one.storage if isinstance(one, TensorRef) else one
        if isinstance(held, StorageRef) and held.dtype in ITEM_BITS:
            sizes[held.key] = held.elements * (ITEM_BITS[held.dtype] // 8)
    members = {}
    for key in keys if isinstance(keys, list) else []:
        if not isinstance(key, str) or key not in sizes:
            break  # of what follows nobody knows where it is
        members[f"data/{key}"] = (at + _LEGACY_LENGTH_BYTES, sizes[key])
        at += _LEGACY_LENGTH_BYTES + sizes[key]
    return members


def resolve_pieces(folder: Folder, listing: DirectoryListing, piece: Piece, dtype: str) -> Piece:
    """Return the same piece with its ``start`` at bytes of elements.

    Reads the header of a zip's member, of a slice of a distributed checkpoint its directory as
    well; nothing where the elements begin at once.

    Args:
        folder: where it is.
        listing: what is there.
        piece: of a tensor.
        dtype: of this tensor, as a name of :data:`resilient.layouts.model.ITEM_BITS`.

    Raises:
        Unreadable: the file is damaged, or says something else than its index.
        StoreError: it could not be read.
    """
    if piece.form is StorageFormat.ARCHIVE:
        piece = _inside(folder, listing, piece, dtype)
    if piece.form is StorageFormat.MEMBER:
        start = data_start(folder, piece.file, piece.start)
        piece = replace(piece, start=start, form=StorageFormat.BYTES)
    if piece.start < 0 or piece.start + piece.size_bytes > listing.sizes.get(piece.file, 0):
        raise Unreadable(f"`{piece.file}` ends too early")
    return piece


def _inside(folder: Folder, listing: DirectoryListing, piece: Piece, dtype: str) -> Piece:
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
