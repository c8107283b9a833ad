"""Zips whose checksums are made right again after their content was changed."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib


def recompute_sums(data: bytes) -> bytes:
    """Return zips, alone or in a row, with checksums that are right."""
    archive, at = bytearray(data), 0
    while (end := data.find(b"PK\x05\x06", at)) >= 0:
        end += 22
        blob = data[at:end]
        with zipfile.ZipFile(io.BytesIO(blob)) as archive_file:
            members, central = archive_file.infolist(), archive_file.start_dir
        for member in members:
            head = member.header_offset
            names = struct.unpack_from("<2H", blob, head + 26)
            begin = head + 30 + sum(names)
            crc = struct.pack("<I", zlib.crc32(blob[begin : begin + member.file_size]))
            archive[at + central + 16 : at + central + 20] = crc
            lengths = struct.unpack_from("<3H", blob, central + 28)
            central += 46 + sum(lengths)
        at = end
    return bytes(archive)
