"""The answers of ``ckpt rollback``, ``undo`` and ``reflog``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.showing import quoted
from resilient_cli.render import Answer, Facts, Table
from resilient_cli.views.words import NONE, age, folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from resilient.vault.registry.moves import Head, Move
    from resilient.vault.rollback import Journey


def moved(command: str, url: str, journey: Journey, number: int | None, *, dry_run: bool) -> Answer:
    """Return the answer of ``ckpt rollback`` or ``ckpt undo``.

    Args:
        command: dotted name.
        url: the repository.
        journey: the move.
        number: the life that it is; None if nothing was changed.
        dry_run: whether nothing was to be changed.
    """
    undo = _way_back(url, journey) if number or (dry_run and journey.is_needed) else ""
    document = {
        "repository": url,
        "done": number is not None,
        "life": number,
        "before": folder(journey.before),
        "after": journey.after.folder,
        "undoes": journey.undoes or None,
        "abandoned": [one.folder for one in journey.left],
        "undo": undo,
    }
    ids = (journey.after.folder,)
    return Answer(command, "move", document, tuple(_said(journey, number, undo)), ids)


def _way_back(url: str, journey: Journey) -> str:
    """Return the command that goes back to where this move began."""
    if journey.undoes and journey.before:
        return f"resilient ckpt rollback {quoted(journey.before)} {quoted(url)}"
    return f"resilient ckpt undo {quoted(url)}"


def _said(journey: Journey, number: int | None, undo: str) -> Iterator[Facts | str]:
    if not journey.is_needed:
        yield f"latest is {journey.after} already. Nothing was changed."
        return
    before = folder(journey.before) or "scratch"
    yield Facts(
        (
            ("latest", f"{before} -> {journey.after}"),
            ("abandoned", _few(journey)),
            ("undo", undo),
        )
    )
    if number:
        yield "Nothing was deleted. A run that still trains here ends at its next save (exit 80)."
    else:
        yield "Only looked: nothing was changed."


def _few(journey: Journey) -> str:
    if not journey.left:
        return NONE
    shown = ", ".join(one.folder for one in journey.left[:3])
    rest = len(journey.left) - 3
    return f"{shown} and {rest} more" if rest > 0 else shown


def moves(url: str, found: Sequence[Move], now: str) -> Answer:
    """Return the answer of ``ckpt reflog``."""
    document = {
        "repository": url,
        "moves": [
            {
                "type": "move",
                "ref": _ref(one),
                "life": one.number,
                "cause": one.life.cause if one.life else None,
                "claimed_at": one.life.claimed_at if one.life else None,
                "host": one.life.host if one.life else None,
                "began_from": folder(one.life.parent) if one.life else None,
                "head": folder(one.head.checkpoint),
                "gone": one.head.gone,
            }
            for one in found
        ],
    }
    rows = tuple(_row(one, now) for one in found)
    table = Table(("REF", "LIFE", "CAUSE", "AGE", "BEGAN FROM", "HEAD"), rows)
    return Answer("ckpt.reflog", "moves", document, (table,), tuple(map(_ref, found)))


def _ref(move: Move) -> str:
    return f"@{{{move.back}}}"


def _row(move: Move, now: str) -> tuple[str, ...]:
    if move.life is None:
        about: tuple[str, ...] = ("DAMAGED", NONE, NONE)
    else:
        began = folder(move.life.parent) or "scratch"
        about = (move.life.cause, age(move.life.claimed_at, now), began)
    return (_ref(move), str(move.number), *about, _head(move.head))


def _head(head: Head) -> str:
    return head.gone or folder(head.checkpoint) or "scratch"
