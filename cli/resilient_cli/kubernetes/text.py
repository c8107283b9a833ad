"""Objects to YAML: blocks of keys and lists; texts that are not plain are quoted as in JSON."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_UNWRITTEN = re.compile(r"[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
# What YAML 1.1 takes for something else than a text.
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


def to_yaml(documents: list[dict[str, Any]]) -> str:
    """Return the documents, each after the mark of a beginning."""
    return "".join(f"---\n{''.join(_block(one, 0))}" for one in documents)


def _block(value: dict[str, Any] | list[Any], depth: int) -> Iterator[str]:
    pad = "  " * depth
    if isinstance(value, dict):
        for key, one in value.items():
            yield f"{pad}{_scalar(key)}:"
            yield from _after(one, depth)
        return
    for one in value:
        if isinstance(one, dict) and one:
            # The first key stands beside the dash.
            yield f"{pad}- {''.join(_block(one, depth + 1)).removeprefix(pad + '  ')}"
        else:
            yield f"{pad}- {_scalar(one)}\n"


def _after(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, dict | list) and value:
        yield "\n"
        yield from _block(value, depth + 1)
    else:
        yield f" {_scalar(value)}\n"


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    text = json.dumps(value, ensure_ascii=False)
    # JSON leaves these as they are, and YAML does not take them so.
    return _UNWRITTEN.sub(lambda one: f"\\u{ord(one[0]):04x}", text)
