"""Hints that are seen once more: one that repeats what has just failed is no help (pure)."""

from __future__ import annotations

import shlex
from itertools import pairwise
from typing import TYPE_CHECKING

from resilient.showing import quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

_LISTING = ["resilient", "ckpt", "ls"]


def another_way(hint: str, given: Sequence[str], code: str) -> str:
    """Return a hint, or another one where it is the very command that failed.

    Args:
        hint: what the error says.
        given: the command line without the program.
        code: of the error.
    """
    try:
        words = shlex.split(hint)
    except ValueError:
        return hint
    said = [one for one in given if not one.startswith("-")]
    # Nearly every error of a place says to list it; who just did wants to know what is wrong there.
    if words[:3] == _LISTING == ["resilient", *said[:2]] and words[3:4] != ["--help"]:
        return f"resilient doctor --repo {quoted(words[3])}" if words[3:] else _explained(code)
    if words[:3] == ["resilient", *said[:2]] and words[3:] and _are_options(words[3:]):
        # The same command with something more: whatever else was typed stays as it was.
        more = words[3:]
        better = [*_without(given, more), *more]
        is_same = sorted(better) == sorted(given)
        return _explained(code) if is_same else shlex.join(["resilient", *better])
    return _explained(code) if words == ["resilient", *given] else hint


def _are_options(words: Sequence[str]) -> bool:
    is_plain = all(one.startswith("--") or one.isdigit() for one in words)
    return words[0].startswith("--") and is_plain and "--help" not in words


def _without(given: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return a command line without these options and their values, which stand after it then.

    Args:
        given: the command line.
        options: what :func:`_are_options` says are some; a number is the value of what precedes it.
    """
    valued = {name: not value.startswith("-") for name, value in pairwise([*options, "--"])}
    kept = []
    rest = iter(given)
    for word in rest:
        name, is_joined, _ = word.partition("=")
        if not name.startswith("--") or name not in valued:
            kept.append(word)
        elif valued[name] and not is_joined:
            next(rest, None)
    return kept


def _explained(code: str) -> str:
    return f"resilient help {code}"
