"""Read back what W&B wrote without a network: the history rows of a ``.wandb`` file.

The file is a log in LevelDB's format: after a head of 7 bytes, blocks of 32 KiB hold chunks of
``crc32 (4), length (2), kind (1), bytes``; a record is one full chunk or first, middle, last ones.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

from resilient.train.trackers.tracker import load

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_FILE_HEAD, _BLOCK = 7, 32 * 1024
_CHUNK = struct.Struct("<IHB")
_FULL, _FIRST, _LAST = 1, 2, 4


def history_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the history, each with ``_step``; a file may end in the middle of one."""
    for record in _parsed(path):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {one.key or ".".join(one.nested_key): json.loads(one.value_json) for one in items}


def last_steps(files: Iterable[Path]) -> dict[str, int]:
    """Return the last step of each metric over several files."""
    last: dict[str, int] = {}
    for file in files:
        for row in history_rows(file):
            step = int(row["_step"])
            last |= {name: max(step, last.get(name, -1)) for name in row}
    return last


def has_ended(path: Path) -> bool:
    """Say whether the file holds the record that ends a run."""
    return any(one.WhichOneof("record_type") == "exit" for one in _parsed(path))


def _parsed(path: Path) -> Iterator[Any]:
    record_type = load("wandb.proto.wandb_internal_pb2").Record
    for content in _records(path.read_bytes()):
        record = record_type()
        record.ParseFromString(content)
        yield record


def _records(content: bytes) -> Iterator[bytes]:
    at, record = _FILE_HEAD, b""
    while at + _CHUNK.size <= len(content):
        left = _BLOCK - at % _BLOCK
        if left < _CHUNK.size:
            at += left
            continue
        _, length, kind = _CHUNK.unpack_from(content, at)
        at += _CHUNK.size
        chunk, at = content[at : at + length], at + length
        if len(chunk) < length:
            return
        record = chunk if kind in (_FULL, _FIRST) else record + chunk
        if kind in (_FULL, _LAST):
            yield record
