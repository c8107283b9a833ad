"""JSON documents that contain a SHA-256 of their own content (sealed), and their validation.

A document is one line of canonical JSON (sorted keys, no spaces, ASCII) and a newline. The field
``root`` is the SHA-256 of the document without this field. A reader accepts only the exact bytes
that a writer would produce, so a change of any bit is detected.

The root detects damage, but the writer of a malicious document can compute a valid root. The reader
therefore checks types, lengths, counts and depths against bounds. It makes this check before it
computes with a value, allocates memory for it or walks it.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from resilient.errors import IntegrityError
from resilient.format.digest import root_digest

Check = Callable[[Any, str], None]
"""Raises ValueError, with the path, if the value is invalid."""

DEPTH_MAX = 100
NUMBER_MAX = 1 << 62
FILES_MAX = 200_000
TENSORS_MAX = 500_000
REGIONS_MAX = 100_000
AXES_MAX = 64
CHECKPOINTS_MAX = 10_000
RECORDS_MAX = 1 << 20
ROW_LENGTH_MAX = 16
CELL_MAX = 1 << 64
_PERIOD_SECONDS_MAX = 3600.0
_NAME_LENGTH_MAX = 4096
_TEXT_LENGTH_MAX = 256
_ELEMENTS_MAX = 1 << 60
_NESTED = frozenset({list, dict})
_DIGEST = re.compile(r"[0-9a-f]{32}")


def text(value: Any, path: str, length_max: int = _TEXT_LENGTH_MAX) -> None:
    """Require a short printable text: no lone surrogates, no control characters."""
    _require(isinstance(value, str) and len(value) <= length_max, path, "is not a short text")
    _require(value.isprintable(), path, "is not a printable text")


def name(value: Any, path: str) -> None:
    """Require a tensor name, which may be long and may contain any keys of a model."""
    _require(isinstance(value, str) and len(value) <= _NAME_LENGTH_MAX, path, "is not a name")


def number(value: Any, path: str) -> None:
    """Require a whole number in the range of file sizes."""
    _require(
        type(value) is int and 0 <= value <= NUMBER_MAX, path, "is not a whole number in bounds"
    )


def digest(value: Any, path: str) -> None:
    """Require an XXH3-128 in hex."""
    is_digest = isinstance(value, str) and _DIGEST.fullmatch(value) is not None
    _require(is_digest, path, "is not a digest")


def any_object(value: Any, path: str) -> None:
    """Require an object of any JSON values."""
    _require(isinstance(value, dict), path, "is not an object")


def nullable(check: Check) -> Check:
    """Require null or a value that ``check`` accepts."""

    def check_value(value: Any, path: str) -> None:
        if value is not None:
            check(value, path)

    return check_value


def list_of(check: Check, count_max: int) -> Check:
    """Require a list of at most ``count_max`` values that ``check`` accepts."""

    def check_value(value: Any, path: str) -> None:
        _require(isinstance(value, list | tuple), path, "is not a list")
        _require(len(value) <= count_max, path, f"has more than {count_max} entries")
        for index, item in enumerate(value):
            check(item, f"{path}/{index}")

    return check_value


def object_with(**inner_check: Check) -> Check:
    """Require an object with these fields; the reader decides about other fields."""

    def check_value(value: Any, path: str) -> None:
        _require(isinstance(value, dict), path, "is not an object")
        for field, check in inner_check.items():
            _require(field in value, path, f"has no `{field}`")
            check(value[field], f"{path}/{field}")

    return check_value


_BOX = object_with(offsets=list_of(number, AXES_MAX), lengths=list_of(number, AXES_MAX))
_STORED = object_with(region=_BOX, file=text, start=number, size_bytes=number, digest=text)
_TENSOR = object_with(
    name=name,
    part=text,
    dtype=text,
    shape=list_of(number, AXES_MAX),
    regions=list_of(_STORED, REGIONS_MAX),
)
_FILE = object_with(
    name=text, size_bytes=number, digest=digest, chunks=list_of(digest, NUMBER_MAX), rank=number
)
_PART = object_with(name=text, scope=text, document=text)
_FILES, _TENSORS = list_of(_FILE, FILES_MAX), list_of(_TENSOR, TENSORS_MAX)
_PARTS = list_of(_PART, FILES_MAX)
_MANIFEST = object_with(
    chunk_bytes=number,
    run_id=text,
    generation=number,
    step=number,
    parent=nullable(text),
    created_at=text,
    world=object_with(size=number, strategy=text),
    files=_FILES,
    tensors=_TENSORS,
    parts=_PARTS,
    config=any_object,
    software=any_object,
    data=any_object,
    metrics=any_object,
    protects=list_of(text, CHECKPOINTS_MAX),
)
_RECEIPT = object_with(rank=number, files=_FILES, tensors=_TENSORS, parts=_PARTS)


_HEARTBEAT = object_with(
    format=text, version=number, number=number, token=text, count=number, stored_at=text, job=text
)
_RECORD = object_with(
    number=number,
    run_id=text,
    parent=nullable(text),
    cause=text,
    claimed_at=text,
    host=text,
    token=text,
)


def row(value: Any, path: str) -> None:
    """Require a ledger record: its kind, then numbers and short texts."""
    list_of(_cell, ROW_LENGTH_MAX)(value, path)
    _require(len(value) > 0 and isinstance(value[0], str), path, "does not state its kind")


def _cell(value: Any, path: str) -> None:
    if isinstance(value, str):
        text(value, path)
        return
    # A seed may use all 64 bits.
    is_whole = type(value) is int and -CELL_MAX <= value <= CELL_MAX
    is_number = is_whole or (type(value) is float and math.isfinite(value))
    _require(is_number, path, "is not a number in bounds")


_PLACE = object_with(step=number, epoch=number, samples=number)
_LEDGER = object_with(
    run_id=text,
    generation=number,
    step=number,
    previous=text,
    opens=text,
    start=_PLACE,
    stop=_PLACE,
    before=number,
    records=list_of(row, RECORDS_MAX),
    checks=list_of(text, RECORDS_MAX),
    head=text,
)


def check_ledger(fields: Mapping[str, Any]) -> None:
    """Check the fields of a ledger segment against the bounds.

    Raises:
        ValueError: A field is missing, of another type or out of bounds.
    """
    _LEDGER(fields, "segment")


def check_manifest(fields: Mapping[str, Any]) -> None:
    """Check a manifest's fields against the bounds, before values are built from them.

    Raises:
        ValueError: A field is missing, of another type or out of bounds. Also raised if tensors
            claim more bytes than their file has, because a read would need more memory than the
            file.
    """
    _MANIFEST(fields, "manifest")
    claimed = _check_tensors(fields["tensors"])
    sizes = {entry["name"]: entry["size_bytes"] for entry in fields["files"]}
    for file, size_bytes in claimed.items():
        _require(size_bytes <= sizes.get(file, 0), file, "is shorter than its tensors")


def check_record(fields: Mapping[str, Any]) -> None:
    """Check the fields of a generation record against the bounds.

    Raises:
        ValueError: A field is missing, of another type or out of bounds.
    """
    _RECORD(fields, "record")
    skipped_count = fields.get("skipped", 0)
    number(skipped_count, "record/skipped")
    _require(
        skipped_count <= fields["number"], "record/skipped", "is above the number of the generation"
    )


def check_heartbeat(fields: Mapping[str, Any]) -> None:
    """Check the fields of a writer's heartbeat against the bounds.

    Raises:
        ValueError: A field is missing, of another type or out of bounds.
    """
    _HEARTBEAT(fields, "heartbeat")
    seconds: Any = fields.get("period_seconds")
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    _require(
        is_number and 0 < seconds <= _PERIOD_SECONDS_MAX,
        "heartbeat/period_seconds",
        "is not a number of seconds in bounds",
    )
    _require(type(fields.get("ended")) is bool, "heartbeat/ended", "is not true or false")


def check_receipt(fields: Mapping[str, Any]) -> None:
    """Check a receipt's fields against the bounds.

    Raises:
        ValueError: As for :func:`check_manifest`.
    """
    _RECEIPT(fields, "receipt")
    _check_tensors(fields["tensors"])


def nested(values: Iterable[Any]) -> list[Any]:
    """Return the lists and objects among parsed JSON values."""
    return [value for value in values if type(value) in _NESTED]


def check_depth(value: Any, depth_max: int = DEPTH_MAX) -> None:
    """Require that lists and objects nest at most ``depth_max`` deep, without recursion.

    Raises:
        ValueError: The values nest deeper.
    """
    level = nested([value])
    for _ in range(depth_max):
        level = nested(
            inner for child in level for inner in (child.values() if type(child) is dict else child)
        )
        if not level:
            return
    raise ValueError(f"it nests more than {depth_max} deep")


def _check_tensors(tensors: list[dict[str, Any]]) -> Counter[str]:
    """Return how many bytes of each file the tensors claim."""
    claimed: Counter[str] = Counter()
    for tensor in tensors:
        # An empty axis must not hide the other axes: strides are products without it.
        elements = math.prod(max(extent, 1) for extent in tensor["shape"])
        _require(elements <= _ELEMENTS_MAX, tensor["name"], "is larger than any memory")
        for region in tensor["regions"]:
            claimed[region["file"]] += region["size_bytes"]
    return claimed


def _require(holds: bool, path: str, problem: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not holds:
        raise ValueError(f"`{path[:80]}` {problem}")


DOCUMENT_BYTES_MAX = 256 << 20
"""Size of a manifest for about 30 TB of state; no document of this format is larger."""
RECORD_BYTES_MAX = 1 << 20
"""Records, marks, tags and similar documents have some hundred bytes."""


def canonical(value: Any) -> bytes:
    """Return the canonical JSON text of ``value``: sorted keys, no spaces, ASCII, a newline.

    Raises:
        ValueError: A float is NaN or infinite, which JSON cannot represent.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii") + b"\n"


def seal(fields: Mapping[str, Any]) -> bytes:
    """Return the document of ``fields`` with its root added."""
    return canonical({**fields, "root": root_digest(canonical(dict(fields)))})


def unseal(data: bytes, key: str) -> dict[str, Any]:
    """Return the fields of a sealed document, root included, or reject the document.

    Args:
        data: Bytes of the document.
        key: Key of the document, for the message.

    Raises:
        IntegrityError: The document is not a JSON object, is not canonical, or its root does not
            match.
    """
    if len(data) > DOCUMENT_BYTES_MAX:
        raise IntegrityError(f"`{key}`: larger than any valid document", key=key)
    try:
        fields = json.loads(data)
        check_depth(fields)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"`{key}`: not readable as JSON ({error})", key=key) from error
    if not isinstance(fields, dict) or not isinstance(fields.get("root"), str):
        raise IntegrityError(f"`{key}`: not a sealed document", key=key)
    claimed = fields["root"]
    body = {name: value for name, value in fields.items() if name != "root"}
    if not _is_canonical(fields, data) or root_digest(canonical(body)) != claimed:
        raise IntegrityError(f"`{key}`: its bytes differ from what was committed", key=key)
    return fields


def _is_canonical(fields: dict[str, Any], data: bytes) -> bool:
    try:
        return canonical(fields) == data
    except ValueError:
        return False
