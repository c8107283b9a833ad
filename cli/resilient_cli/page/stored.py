"""The checkpoints that are there now: how large, in which state, and which one a resume takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient_cli.page.lineage import generations, lives_of, tree
from resilient_cli.page.sizes import alone_bytes, sizes
from resilient_cli.page.tables import at, legend, scroll, table, text
from resilient_cli.render import human_size
from resilient_cli.views.listing import closing, note
from resilient_cli.views.words import NONE, count

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient_cli.survey import Level, Survey
    from resilient_cli.views.listing import Listing

_LEGEND = legend(
    ("next", "a resume takes it"),
    ("node", "whole"),
    ("abandoned", "abandoned"),
    ("broken", "damaged"),
)


def stored_part(found: Listing, *, served: bool, checked: Mapping[str, str]) -> str:
    """Return what a repository holds: its tree, and a table, newest first.

    Args:
        found: what is there.
        served: whether more can be asked for.
        checked: what was seen when all bytes were read, by checkpoint.
    """
    head = ["there now", "saved at", "size", "own", "alone", "ranks", "state", "note"]
    head += ["look"] if served else ["every byte"] if checked else []
    alone = alone_bytes(found)
    rows = [_row(found, one, alone, served=served, checked=checked) for one in found.surveys]
    spots = [_LEGEND, scroll(tree(found))] if found.surveys else []
    return "".join(
        [
            f"<p>{text(closing(found))}</p>",
            *spots,
            table(head, rows, numbers=(2, 3, 4, 5)),
            "<p>Own is what it wrote itself; alone is what no other checkpoint needs.</p>",
        ]
    )


def lives_part(found: Listing) -> str:
    """Return when the lives were, and what checkpoints cost."""
    times = generations(found)
    drawn = scroll(times) if times else ""
    return f"<h3>Generations</h3>{drawn}{lives_of(found)}<h3>Sizes</h3>{sizes(found)}"


def _row(
    found: Listing,
    one: Survey,
    alone: Mapping[str, int],
    *,
    served: bool,
    checked: Mapping[str, str],
) -> tuple[str, ...]:
    about: tuple[str, ...] = (NONE, NONE, NONE, NONE, NONE)
    name = one.checkpoint.folder
    if one.manifest:
        about = (
            at(one.manifest.created_at),
            human_size(one.manifest.size_bytes),
            human_size(one.manifest.own_bytes),
            human_size(alone[name]),
            text(one.manifest.world.get("size", NONE)),
        )
    state = f'<span class="s-{one.state.lower()}">{found.state(one)}</span>'
    mark = ' <span class="badge">next</span>' if one.checkpoint == found.resume else ""
    more = (_links(one),) if served else (checked.get(name, NONE),) if checked else ()
    return (
        f'<span class="one-line">{name}{mark}</span>',
        *about,
        state,
        text(note(found, one)),
        *more,
    )


def _links(one: Survey) -> str:
    name = one.checkpoint.folder
    if one.manifest is None:
        return NONE
    return (
        f'<span class="links"><a href="#tensors/{name}">tensors</a> '
        f'<button data-verify="{name}" aria-label="verify {name}">verify</button></span>'
    )


def verified(one: Survey, level: Level) -> str:
    """Return what was found when a checkpoint was looked at."""
    name = one.checkpoint.folder
    if not one.findings and one.manifest:
        files = count(len(one.manifest.files), "file")
        size = human_size(one.manifest.size_bytes)
        said = f"{name}: every byte of {files}, {size}, is what was written."
        return f'<p class="verdict v-same">{said}</p>'
    rows = [
        (
            f'<span class="s-{each.severity}">{each.severity}</span>',
            text(each.file),
            f"{each.start}-{each.stop}" if each.stop > each.start else NONE,
            text(each.tensor or NONE),
            text(each.problem),
            text(each.fix),
        )
        for each in one.findings
    ]
    state = "DAMAGED" if one.damaged else "a warning"
    head = ("severity", "file", "bytes", "tensor", "problem", "what helps")
    return f'<p class="verdict v-differ">{name}: {state} (level {level.value}).</p>' + table(
        head, rows, ()
    )
