"""The checkpoints that are there now: how large, in which state, and which one a resume takes."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from resilient_cli.page.tables import table
from resilient_cli.render import human_size
from resilient_cli.views.listing import closing, note
from resilient_cli.views.words import NONE

if TYPE_CHECKING:
    from resilient_cli.survey import Survey
    from resilient_cli.views.listing import Listing


def stored_part(found: Listing) -> str:
    """Return what a repository holds, newest first."""
    rows = [_row(found, one) for one in found.surveys]
    head = ("there now", "saved at", "size", "own", "ranks", "state", "note")
    return f"<p>{escape(closing(found))}</p>" + table(head, rows, numbers=(2, 3, 4))


def _row(found: Listing, one: Survey) -> tuple[str, ...]:
    about: tuple[str, ...] = (NONE, NONE, NONE, NONE)
    if one.manifest:
        about = (
            escape(one.manifest.created_at),
            human_size(one.manifest.size_bytes),
            human_size(one.manifest.own_bytes),
            escape(str(one.manifest.world.get("size", NONE))),
        )
    state = f'<span class="s-{one.state.lower()}">{found.state(one)}</span>'
    return (escape(one.checkpoint.folder), *about, state, escape(note(found, one)))
