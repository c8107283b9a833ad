"""Reader of ``torch.save`` files: a zip with one pickle and the bytes of the tensors.

Source of the layout: ``torch.serialization`` and ``caffe2/serialize``. torch never compresses a
member of the zip. A few compressed bytes could expand beyond any memory. The reader therefore
refuses compressed members. torch before 1.6 wrote a sequence of pickles instead of a zip. The
module reads these files too.
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
"""Largest single read. The directory of a zip with 100,000 members has 10 MB."""
_AHEAD_BYTES = 64 << 10


class RangeReader(io.RawIOBase):
    """A part of a file as a readable stream with a small cache.

    Args:
        folder: Folder of the file.
        name: Name of the file.
        start: Offset of the part in the file.
        size_bytes: Length of the part.
    """

    def __init__(self, folder: Folder, name: str, start: int, size_bytes: int) -> None:
        super().__init__()
        self._folder, self._name = folder, name
        self._start, self._size = start, size_bytes
        self._at = 0
        self._block, self._block_start = b"", 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError("before the start")
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Return the next ``size`` bytes, or all that are left; at most 16 MiB.

        ``zipfile`` requests the remaining bytes of a member with further calls. But ``zipfile``
        reads a directory in one call, so a larger directory counts as truncated.
        """
        remaining_bytes = max(0, self._size - self._at)
        size = min(remaining_bytes if size < 0 else size, remaining_bytes, READ_MAX)
        if not self._at >= self._block_start or self._at + size > self._block_start + len(
            self._block
        ):
            # ``zipfile`` reads a zip from its end, so one read fetches all bytes near the end.
            begin = (
                self._at if remaining_bytes > _AHEAD_BYTES else max(0, self._size - _AHEAD_BYTES)
            )
            length = min(max(size, _AHEAD_BYTES), self._size - begin)
            length = max(length, self._at + size - begin)
            self._block = self._folder.read(self._name, self._start + begin, length)
            self._block_start = begin
        offset = self._at - self._block_start
        data = self._block[offset : offset + size]
        self._at += len(data)
        return data


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
    """Content of one torch file.

    Attributes:
        value: Its object; tensors are references.
        names: Globals that the pickle would import.
        members: Offset and size of every member by its name without the root folder.
        byteorder: Byte order of its numbers.
        base: Offset of the archive in the file.
        form: Format of the bytes at a member's offset.
        sums: Checksum of every member, zero if torch wrote none.
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
        """Return every tensor under its dotted path.

        Raises:
            Unreadable: The value exceeds the bounds.
        """
        return tensors_in(self, self.value, part)

    def pieces(self, tensor: TensorRef) -> tuple[Piece, ...]:
        """Return the location of a tensor's bytes as one piece; empty if not in this file."""
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
        """Return a number, or the element of a one-element tensor; None for any other value.

        Raises:
            StoreError: The file could not be read.
        """
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
        return self._element(value) if isinstance(value, TensorRef) else None

    def head(self, tensor: TensorRef, count: int) -> bytes:
        """Return the first bytes of a tensor; empty if its bytes are not in this file.

        Raises:
            StoreError: The file could not be read.
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
        """Return the element of a one-element tensor; None if it is larger or not in this file."""
        if tensor.dtype not in _NUMBERS or any(extent != 1 for extent in tensor.shape):
            return None
        item_bytes = ITEM_BITS[tensor.dtype] // 8
        data = self.head(tensor, item_bytes)
        if len(data) != item_bytes:
            return None
        order = ">" if self.byteorder == "big" else "<"
        number: float | int = struct.unpack(order + _NUMBERS[tensor.dtype], data)[0]
        return number


def tensors_in(archive: Archive, value: Any, part: str) -> tuple[Tensor, ...]:
    """Return every tensor to which a value of an archive refers, by its dotted path.

    Raises:
        Unreadable: The value exceeds the bounds.
    """
    return tuple(
        Tensor(
            ".".join(map(_word, path)),
            part,
            leaf.dtype,
            leaf.shape,
            (archive.name,),
            archive.pieces(leaf),
        )
        for path, leaf in leaves(value)
        if isinstance(leaf, TensorRef)
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
    """Return the content of a torch file, or of a part of a file that is one.

    The function reads the directory of the zip and the pickle, and verifies the pickle's checksum.
    It reads no tensor data.

    Args:
        folder: Folder of the file.
        listing: Its files.
        name: Name of the file.
        start: Offset of the part.
        size_bytes: Length of the part; by default up to the end of the file.

    Raises:
        Unreadable: The file is not a torch file, or is damaged or hostile.
        StoreError: The file could not be read.
    """
    if name not in listing.sizes:
        raise Unreadable(listing.why_unread(name))
    file_bytes = listing.sizes[name]
    size_bytes = file_bytes - start if size_bytes is None else size_bytes
    if start < 0 or size_bytes <= 0 or start + size_bytes > file_bytes:
        raise Unreadable("it is empty" if file_bytes == 0 else "it ends too early")
    try:
        with zipfile.ZipFile(RangeReader(folder, name, start, size_bytes)) as opened:
            members = opened.infolist()
    except (*BROKEN, KeyNotFound) as error:
        return _legacy(folder, name, start, size_bytes, error)
    return _archive(folder, name, start, members)


def _archive(folder: Folder, name: str, start: int, zip_members: list[zipfile.ZipInfo]) -> Archive:
    pickles = [member for member in zip_members if member.filename.rpartition("/")[2] == "data.pkl"]
    if len(pickles) != 1:
        raise Unreadable(f"a zip with {len(pickles)} pickles is not a file of torch")
    stored_members = [
        member for member in zip_members if member.compress_type == zipfile.ZIP_STORED
    ]
    if any(is_contradictory(member) for member in stored_members):
        raise Unreadable("the directory of the zip contradicts itself")
    root = pickles[0].filename.removesuffix("data.pkl")
    members = {
        member.filename.removeprefix(root): (member.header_offset, member.file_size)
        for member in stored_members
    }
    pickled = read_pickle(_member(folder, name, start, pickles[0]), rebuild)
    order = next((member for member in zip_members if member.filename == f"{root}byteorder"), None)
    byteorder = "little" if order is None else _member(folder, name, start, order).decode("latin1")
    sums = {member.filename.removeprefix(root): member.CRC for member in stored_members}
    return Archive(folder, name, pickled.value, pickled.names, members, byteorder, start, sums=sums)


def is_contradictory(member: zipfile.ZipInfo) -> bool:
    """Return True if a directory gives two lengths for an uncompressed member."""
    is_stored = member.compress_type == zipfile.ZIP_STORED
    return is_stored and member.compress_size != member.file_size


def _member(folder: Folder, name: str, start: int, info: zipfile.ZipInfo) -> bytes:
    """Return a small member, verified by its checksum if it has one."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise Unreadable(f"`{info.filename}` in it is compressed, which torch never does")
    if info.file_size > BYTES_MAX:
        raise Unreadable(f"`{info.filename}` in it has {info.file_size} bytes")
    at = data_start(folder, name, start + info.header_offset)
    data = folder.read(name, at, info.file_size)
    # If checksums are disabled in torch, the field is zero.
    if len(data) != info.file_size or (info.CRC and zlib.crc32(data) != info.CRC):
        raise Unreadable(f"the checksum of `{info.filename}` in it is wrong")
    return data


def data_start(folder: Folder, name: str, header_at: int) -> int:
    """Return the offset of the content of a zip member, computed from its local header."""
    head = folder.read(name, header_at, _LOCAL_HEADER.size)
    if len(head) != _LOCAL_HEADER.size or not head.startswith(_LOCAL_MAGIC):
        raise Unreadable("a member of the zip is not where its directory says")
    *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(head)
    return header_at + _LOCAL_HEADER.size + int(name_bytes) + int(extra_bytes)


def _legacy(folder: Folder, name: str, start: int, size_bytes: int, error: Exception) -> Archive:
    """Return the content of a file of torch before 1.6: magic, version, system, object."""
    head = folder.read(name, start, min(size_bytes, BYTES_MAX))
    at = head.find(_LEGACY_MAGIC, 0, 64)
    if head[_TAR_AT : _TAR_AT + len(_TAR)] == _TAR:
        raise Unreadable("a tar file, as written by torch before 0.1.10: `torch.save` it again")
    if at < _LEGACY_PROTO_BYTES:
        require_no_pointer(folder, name)
        raise Unreadable(f"not a file of torch: {str(error)[:120]}") from error
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
    """Return the location of each storage: all follow their keys, each after its length."""
    sizes: dict[str, int] = {}
    for _, leaf in leaves(value):
        storage = leaf.storage if isinstance(leaf, TensorRef) else leaf
        if isinstance(storage, StorageRef) and storage.dtype in ITEM_BITS:
            sizes[storage.key] = storage.elements * (ITEM_BITS[storage.dtype] // 8)
    members = {}
    for key in keys if isinstance(keys, list) else []:
        if not isinstance(key, str) or key not in sizes:
            break  # the positions of all later storages are unknown
        members[f"data/{key}"] = (at + _LEGACY_LENGTH_BYTES, sizes[key])
        at += _LEGACY_LENGTH_BYTES + sizes[key]
    return members


def resolve_pieces(folder: Folder, listing: DirectoryListing, piece: Piece, dtype: str) -> Piece:
    """Return a piece with its ``start`` moved to the bytes of its elements.

    The function reads the header of a zip member. For a slice of a distributed checkpoint, it also
    reads the directory. If the elements begin at ``start``, the function reads nothing.

    Args:
        folder: Folder of the file.
        listing: Its files.
        piece: A piece of a tensor.
        dtype: Dtype of the tensor, a name of :data:`resilient.layouts.model.ITEM_BITS`.

    Raises:
        Unreadable: The file is damaged, or contradicts its index.
        StoreError: The file could not be read.
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
    value = archive.value
    if not isinstance(value, TensorRef):
        raise Unreadable(f"a slice of `{piece.file}` holds no tensor")
    if value.shape != piece.region.lengths or value.dtype != dtype:
        raise Unreadable(f"a slice of `{piece.file}` differs from the index")
    pieces = archive.pieces(value)
    if not pieces:
        raise Unreadable(f"a slice of `{piece.file}` lacks its bytes")
    return replace(pieces[0], region=piece.region)
