"""Sealed JSON documents: canonical bytes that carry their own root digest.

A document is one line of canonical JSON (sorted keys, no spaces, ASCII) and a newline. Its
``root`` is the SHA-256 of the same document without that field. Reading demands the very bytes
that writing would produce, so a change of any bit is found.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from resilient.errors import IntegrityError
from resilient.format.bounds import check_depth
from resilient.format.digest import root_digest

if TYPE_CHECKING:
    from collections.abc import Mapping

DOCUMENT_BYTES_MAX = 256 << 20
"""A manifest of 30 TB of state has about as much; nothing of ours is larger."""
RECORD_BYTES_MAX = 1 << 20
"""Records, marks, tags and the like have some hundred bytes."""


def canonical(value: Any) -> bytes:
    """Return the one JSON text of ``value``: sorted keys, no spaces, ASCII, a newline.

    Raises:
        ValueError: a float is NaN or infinite, which JSON cannot say.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii") + b"\n"


def seal(fields: Mapping[str, Any]) -> bytes:
    """Return the document of ``fields`` with its root added."""
    return canonical({**fields, "root": root_digest(canonical(dict(fields)))})


def unseal(data: bytes, key: str) -> dict[str, Any]:
    """Return the fields of a sealed document, root included, or refuse it.

    Args:
        data: the document's bytes.
        key: where they were found, for the message.

    Raises:
        IntegrityError: not a JSON object, not canonical, or its root does not match.
    """
    if len(data) > DOCUMENT_BYTES_MAX:
        raise IntegrityError(f"`{key}`: larger than any document of ours", key=key)
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
        raise IntegrityError(f"`{key}`: its bytes are not what was committed", key=key)
    return fields


def _is_canonical(fields: dict[str, Any], data: bytes) -> bool:
    try:
        return canonical(fields) == data
    except ValueError:
        return False
