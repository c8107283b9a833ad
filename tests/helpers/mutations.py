"""Ways to spoil bytes and documents, from a seed, so that a failure can be made again."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from resilient.format.document import seal

if TYPE_CHECKING:
    from random import Random

DEEP = 5_000
BYTES = (b"\0", b"\xff", b'"', b"{", b"[", b"}", b"]", b"$", b"-", b"\n", b"\xed\xa0\x80", b"NaN")
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**30, -(10**30), 10**4000, 1.5, -0.0, 1e308,
    "", "x" * 5_000, "..", "../../etc/passwd", "/etc/passwd", "a/b", "a\0b", "\ud800", "\x1b[2J",
    "manifest.json", ".tmp-1", "checkpoint-0-g0", "checkpoint-7-g1", "F64", "O", "S999999999",
    [], {}, [[]], [0] * 2_000, [-1], [2**62, 2**62], [0, 2**62, 2**62], {"$tensor": []},
    {"$numpy": ["O", {"$tensor": "model/weight"}]}, {"$dict": [[{}, 1]]}, {"$set": [[1]]},
    {"$bytes": "%"}, {"$float": "1"}, {"$size": ["a"]}, {"$device": "nowhere"}, {"$new": 1},
)  # fmt: skip


def deep(levels: int = DEEP) -> Any:
    """Return lists in lists."""
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def spoiled_bytes(random: Random, data: bytes, other_files: list[bytes]) -> bytes:
    """Return ``data`` after one to four small accidents."""
    copy = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at, to = sorted(random.randrange(len(copy) + 1) for _ in range(2))
        kind = random.randrange(7)
        if kind == 0 and copy:
            copy[at % len(copy)] ^= 1 << random.randrange(8)
        elif kind == 1:
            del copy[at : at + random.randrange(16)]
        elif kind == 2:
            copy[at:at] = random.choice(BYTES) * random.choice((1, 1, 1, 8, 2_000))
        elif kind == 3:
            copy[at:at] = random.randbytes(random.randrange(1, 9))
        elif kind == 4:
            copy[at:at] = copy[at:to]
        elif kind == 5:
            donor = random.choice(other_files)
            begin = random.randrange(len(donor) + 1)
            copy[at:to] = donor[begin : begin + to - at]
        else:
            del copy[at:]
    return bytes(copy)


def places_of(value: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) inside a JSON value."""
    places: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        node = waiting.pop()
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, inner in items:
            places.append((node, key))
            if isinstance(inner, dict | list):
                waiting.append(inner)
    return places


def spoiled_value(random: Random, value: Any) -> Any:
    """Return a JSON value with one to three places changed for something odd."""
    value = json.loads(json.dumps(value))
    for _ in range(random.randint(1, 3)):
        places = places_of(value)
        if not places:
            return value
        holder, key = random.choice(places)
        kind = random.randrange(6)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[random.choice(("$tensor", "x", "root", "..", "$dict"))] = holder.pop(key)
        elif kind == 2:
            container, place = random.choice(places)
            holder[key] = json.loads(json.dumps(container[place]))
        elif kind == 3 and isinstance(holder, list):
            holder += holder[:50]
        else:
            # A copy: the next change may be inside of it.
            odd = deep(random.choice((90, 300))) if kind == 4 else deepcopy(random.choice(VALUES))
            holder[key] = odd
    return value


def reseal(value: Any) -> bytes:
    """Seal an object as somebody would who wants it to be believed."""
    return seal({name: child for name, child in value.items() if name != "root"})
