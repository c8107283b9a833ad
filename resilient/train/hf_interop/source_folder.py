"""Source folder of an import, read by the safety rules of ``resilient ckpt inspect``.

Only plain files inside the folder are opened. A link that leads out of the folder, a pipe, a device
and a name with ``..`` are refused. A file that changes during the import is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from resilient.errors import IntegrityError, StoreError
from resilient.layouts.json_files import read_json, read_text
from resilient.layouts.model import Unreadable
from resilient.redaction import shell_quote
from resilient.storage.folder import LocalFolder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.storage.folder import DirectoryListing

_BLOCK_BYTES = 4 << 20
_IMPORTED = (".safetensors", ".bin", ".pt", ".pth", ".distcp", ".json", ".metadata", "latest")
"""Suffixes of the files that an import reads or that influence its decisions."""
_REPORT = "rebuilt.json"


class SourceFolder:
    """Folder of another tool; the file list is read once, when the object is made.

    Args:
        path: The folder, which may itself be a link because the user named it.

    Attributes:
        path: The folder.
        folder: The same folder for readers of :mod:`resilient.layouts`.
        listing: Files of the folder.

    Raises:
        StoreError: The folder could not be listed.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.folder = LocalFolder(self.path)
        self.listing: DirectoryListing = self.folder.list()
        self._marks = {name: self._mark(name) for name in self.listing.sizes}

    def has(self, name: str) -> bool:
        """Return whether an entry of any kind has this name."""
        return self.listing.is_there(name)

    def has_folder(self, name: str) -> bool:
        """Return whether files exist below a name."""
        start = f"{name}/"
        return any(file.startswith(start) for file in (*self.listing.sizes, *self.listing.outside))

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of the files in one subfolder, without the prefix."""
        names = (file[len(prefix) :] for file in self.listing.sizes if file.startswith(prefix))
        return sorted(name for name in names if "/" not in name)

    def open(self, name: str) -> BinaryIO:
        """Open a plain file that was listed.

        Raises:
            IntegrityError: The file is missing, not a plain file inside the folder, or changed.
        """
        if name not in self.listing.sizes:
            raise self._refused(name, self.listing.why_unread(name))
        try:
            # A pipe that replaces the file in the meantime must not block the import.
            handle = os.open(self.path / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise self._refused(name, str(error.strerror)) from error
        file = os.fdopen(handle, "rb")
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or _mark_of(status) != self._marks[name]:
            file.close()
            raise self._changed(name)
        return file

    def read(self, name: str) -> bytes:
        """Return the bytes of a file that was listed.

        Raises:
            IntegrityError: As for :meth:`open`.
        """
        with self.open(name) as file:
            return file.read(self.listing.sizes[name])

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """Return a range of a file that was listed.

        Raises:
            IntegrityError: As for :meth:`open`, or the file ends before the range.
        """
        if start < 0 or length < 0 or start + length > self.listing.sizes.get(name, 0):
            reason = "it ends too early" if name in self.listing.sizes else ""
            raise self._refused(name, reason or self.listing.why_unread(name))
        with self.open(name) as file:
            file.seek(start)
            return file.read(length)

    def document(self, name: str) -> dict[str, Any]:
        """Return a JSON object, bounded in size and depth.

        Raises:
            IntegrityError: The file does not contain such an object.
        """
        try:
            return read_json(self.folder, self.listing, name)
        except (Unreadable, StoreError) as error:
            raise self._refused(name, str(error)) from error

    def line(self, name: str) -> str:
        """Return the first line of a small text file; empty text if there is none."""
        return read_text(self.folder, self.listing, name)

    def digest(self) -> str:
        """Return a SHA-256 over names, sizes and contents of all files that an import reads.

        Raises:
            IntegrityError: A file changed since the folder was listed.
        """
        folder_digest = hashlib.sha256()
        for name in sorted(self.listing.sizes):
            if name.endswith(_IMPORTED) and name != _REPORT:
                entry = [name, self.listing.sizes[name], self._digest_of(name)]
                folder_digest.update(json.dumps(entry).encode() + b"\n")
        return folder_digest.hexdigest()

    def require_unchanged(self) -> None:
        """Require that the folder has the listed files, unchanged.

        Raises:
            IntegrityError: A file was added, removed or changed.
        """
        try:
            listing = self.folder.list()
            changed_files = set(listing.sizes) ^ set(self.listing.sizes)
            changed_files |= {
                file for file in listing.sizes if self._mark(file) != self._marks.get(file)
            }
        except StoreError as error:
            raise self._changed(".") from error
        if changed_files:
            raise self._changed(min(changed_files))

    def _digest_of(self, name: str) -> str:
        hasher = hashlib.sha256()
        with self.open(name) as file:
            for block in _blocks(file):
                hasher.update(block)
        return hasher.hexdigest()

    def _mark(self, name: str) -> tuple[int, ...]:
        try:
            return _mark_of((self.path / name).stat())
        except OSError:
            return ()

    def _refused(self, name: str, why: str) -> IntegrityError:
        return IntegrityError(
            f"`{self.path / name}` cannot be read: {why}",
            key=str(self.path / name),
            hint=f"resilient ckpt verify {shell_quote(str(self.path))}",
        )

    def _changed(self, name: str) -> IntegrityError:
        return IntegrityError(
            f"`{self.path}` changed while it was read (`{name}`); nothing was imported",
            key=str(self.path / name),
            hint="stop the process that writes there, and run the same command again",
        )


def _mark_of(status: os.stat_result) -> tuple[int, ...]:
    """Return file attributes that differ if the file changed."""
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _blocks(opened: BinaryIO) -> Iterator[bytes]:
    while block := opened.read(_BLOCK_BYTES):
        yield block
