"""Page of ``resilient report -o`` and ``resilient ui``, put together from its sections."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from resilient.errors import StoreError
from resilient.redaction import shell_quote
from resilient_cli.output import human_size
from resilient_cli.page.assets import foot_of, head_of, style
from resilient_cli.page.checkpoints import lives_part, stored_part
from resilient_cli.page.svg import curve, timeline
from resilient_cli.page.tables import scroll, table, text
from resilient_cli.views.goodput import KEEPS, UNTOLD, moment, span_of
from resilient_cli.views.text import NONE, count, duration, share

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from resilient.goodput.report import GoodputReport
    from resilient_cli.views.listing import Listing

_SAVED_SHOWN = 50


def run_part(found: GoodputReport) -> str:
    """Return the section about a run: time, attempts, loss, faults and saves."""
    return "".join(
        [
            _tiles(found),
            "<h3>Where the time went</h3>",
            _bar(found),
            _classes(found),
            "<h3>Lives</h3>",
            "<p>Triangles are faults, notches are checkpoints; point at a mark for its name.</p>",
            scroll(timeline(found)),
            "<h3>Loss</h3>",
            "<p>Attempts alternate between two colours; grey steps were rolled back or lost.</p>",
            scroll(curve(found)),
            "<h3>Faults</h3>",
            _faults(found),
            "<h3>Saves</h3>",
            _checkpoints(found),
        ]
    )


def _tiles(found: GoodputReport) -> str:
    now = found.now
    of = f" / {now.max_steps}" if now.max_steps else ""
    tiles = (
        (share(found.goodput, 1), "goodput"),
        (duration(found.wall_ms), "wall clock"),
        (f"{now.step}{of}", "steps"),
        (str(found.lost_steps), "steps lost"),
        (str(len(found.faults)), "faults"),
        (str(len(found.doings)), "lives"),
    )
    cells = "".join(f'<div class="tile"><b>{text}</b><span>{of}</span></div>' for text, of in tiles)
    return f'<div class="tiles">{cells}</div>'


def _bar(found: GoodputReport) -> str:
    cells = "".join(
        f'<i class="c-{kind.value}" style="width:{100 * length / found.wall_ms:.2f}%"'
        f' title="{kind.value} {duration(length)}"></i>'
        for kind, length in found.spent_ms.items()
        if length
    )
    return f'<div class="bar">{cells}</div>'


def _classes(found: GoodputReport) -> str:
    rows = [
        (
            f'<i class="dot c-{kind.value}"></i>{kind.value.replace("_", " ")}',
            duration(length),
            share(length, found.wall_ms),
        )
        for kind, length in found.spent_ms.items()
        if length
    ]
    rows.append(("all", duration(found.wall_ms), share(found.wall_ms, found.wall_ms)))
    return table(("class", "time", "share"), rows, numbers=(1, 2))


def _faults(found: GoodputReport) -> str:
    if not found.faults:
        return "<p>None.</p>"
    causes = [
        (
            text(cause),
            str(repair.count),
            duration(repair.mttr_ms),
            str(repair.lost_steps),
            duration(repair.lost_ms),
        )
        for cause, repair in found.repairs.items()
    ]
    rows = [
        (
            str(fault.life),
            duration(fault.at_ms - found.began_ms),
            text(fault.cause),
            text(fault.host or NONE) + (f", rank {fault.rank}" if fault.rank >= 0 else ""),
            text(fault.detail or NONE),
            duration(fault.down_ms),
            str(fault.lost_steps),
            duration(fault.lost_ms),
        )
        for fault in found.faults
    ]
    head = ("attempt", "after", "cause", "where", "detail", "down", "lost steps", "lost time")
    return table(
        ("cause", "faults", "mean time to repair", "lost steps", "lost time"),
        causes,
        numbers=(1, 2, 3, 4),
    ) + table(head, rows, numbers=(5, 6, 7))


def _checkpoints(found: GoodputReport) -> str:
    if not found.saved:
        return "<p>None.</p>"
    written = sum(save.written_bytes for save in found.saved)
    rows = [
        (
            text(save.checkpoint),
            duration(save.at_ms - found.began_ms),
            human_size(save.size_bytes),
            human_size(save.written_bytes),
            duration(save.commit_ms),
            duration(save.stall_ms),
        )
        for save in found.saved[-_SAVED_SHOWN:]
    ]
    last = f", the last {_SAVED_SHOWN} of them" if len(found.saved) > _SAVED_SHOWN else ""
    said = f"<p>{count(len(found.saved), 'checkpoint')}, {human_size(written)} written{last}.</p>"
    head = ("checkpoint", "after", "size", "written", "durable in", "training waited")
    return said + table(head, rows, numbers=(1, 2, 3, 4, 5))


_ONLY_FILE = "This page is a file, and was written without them. Use"


@dataclass(frozen=True, slots=True)
class Extras:
    """HTML that a page in a file contains only on request.

    Attributes:
        tensors: Tensors of one checkpoint.
        compared: Comparison of two checkpoints.
        checked: State of each checkpoint after all bytes were read.
        verified: Findings of reading all bytes.
    """

    tensors: str = ""
    compared: str = ""
    checked: Mapping[str, str] = field(default_factory=dict)
    verified: str = ""


@dataclass(frozen=True, slots=True)
class PageSection:
    """Section of the page that is shown alone.

    Attributes:
        id: Fragment of its address.
        name: Name that the reader sees.
        body: HTML.
        is_live: True if a renewal replaces the whole section.
    """

    id: str
    name: str
    body: str
    is_live: bool = False


def page_of(
    found: GoodputReport,
    name: str,
    stored: Listing | None = None,
    version: str = "",
    extras: Extras | None = None,
) -> str:
    """Return the complete page of a run, which loads nothing else.

    Args:
        found: Goodput report of the run.
        name: Name of the run, as given.
        stored: Contents of the repository; None if unknown.
        version: Version of a served page, which checks for a newer one; empty for a page in a file.
        extras: Further parts of a page in a file.
    """
    more = extras or Extras()
    served, is_told = bool(version), bool(found.doings or found.launches or stored is None)
    views = [
        PageSection("run", "Run", run_part(found) if is_told else _untold(), is_live=True),
        PageSection("checkpoints", "Checkpoints", _checkpoints_part(stored, more, served=served)),
    ]
    if stored and served:
        views += [
            PageSection("tensors", "Tensors", _chosen(stored)),
            PageSection("compare", "Compare", _pair(stored)),
        ]
    elif stored:
        tensors = more.tensors or _missing("resilient report RUN -o FILE --tensors latest")
        compared = more.compared or _missing("resilient report RUN -o FILE --compare A B")
        views += [
            PageSection("tensors", "Tensors", tensors),
            PageSection("compare", "Compare", compared),
        ]
    ends = (moment(found.began_ms), moment(found.ended_ms))
    if stored and not is_told:
        ends = span_of(stored)
    said = f"{ends[0]} to {ends[1]}"
    return whole_page(name, said, views, version)


def _untold() -> str:
    return f"<p>{UNTOLD}</p><p><code>{KEEPS}</code></p>"


def whole_page(name: str, said: str, views: Sequence[PageSection], version: str = "") -> str:
    """Return a page of several sections.

    Args:
        name: Title of the page.
        said: Line below the title.
        views: Sections, in order.
        version: Version of a served page.
    """
    links = "".join(f'<a href="#{view.id}">{view.name}</a>' for view in views)
    nav = f'<nav aria-label="parts of the page">{links}</nav>' if len(views) > 1 else ""
    body = "".join(_section(view) for view in views)
    live = ' id="when" data-live' if version else ""
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"{head_of(version)}<title>{text(name)}</title><style>{style()}</style></head>"
        '<body><a class="skip" href="#main">To the content</a>'
        f"<header><div><h1>{text(name)}</h1><p{live}>{said}</p></div>{nav}</header>"
        f'<main id="main" tabindex="-1">{body}</main>{foot_of(version)}</body></html>\n'
    )


def _section(section: PageSection) -> str:
    live = f' id="{section.id}-live" data-live' if section.is_live else ""
    return (
        f'<section class="view" id="{section.id}" aria-labelledby="{section.id}-name">'
        f'<h2 id="{section.id}-name" class="top" tabindex="-1">{section.name}</h2>'
        f"<div{live}>{section.body}</div></section>"
    )


def _checkpoints_part(stored: Listing | None, more: Extras, *, served: bool) -> str:
    if stored is None:
        return "<p>No repository of checkpoints is in this folder.</p>"
    lives = [f' id="{part_id}-live" data-live' if served else "" for part_id in ("stored", "lives")]
    shown = stored_part(stored, served=served, checked=more.checked)
    room = '<div id="verify-room" class="room"></div>' if served else more.verified
    return f"<div{lives[0]}>{shown}</div>{room}<div{lives[1]}>{lives_part(stored)}</div>"


def _missing(command: str) -> str:
    return f"<p>{_ONLY_FILE}</p><p><code>resilient ui RUN</code></p><p><code>{command}</code></p>"


def _options(stored: Listing, chosen: str) -> str:
    found = []
    for survey in stored.surveys:
        name = survey.checkpoint.folder
        if survey.manifest is not None:
            mark = " selected" if name == chosen else ""
            found.append(f'<option value="{name}"{mark}>{name}</option>')
    return "".join(found)


def _chosen(stored: Listing) -> str:
    chosen = stored.resume.folder if stored.resume else ""
    return (
        '<div class="tools"><label>Checkpoint <select id="of" data-live>'
        f"{_options(stored, chosen)}</select></label></div>"
        "<p>Open a row to see how the numbers of a tensor are spread.</p>"
        '<div id="tensors-room" class="room"></div>'
    )


def _pair(stored: Listing) -> str:
    names = [survey.checkpoint.folder for survey in stored.surveys if survey.manifest]
    chosen = stored.resume.folder if stored.resume else names[0] if names else ""
    place = names.index(chosen) if chosen in names else 0
    before = names[min(place + 1, len(names) - 1)] if names else ""
    return (
        '<form class="tools"><label>A <select id="a" data-live>'
        f"{_options(stored, before)}</select></label>"
        f'<label>B <select id="b" data-live>{_options(stored, chosen)}</select></label>'
        '<button class="act">Compare</button></form>'
        '<div id="compare-room" class="room"><p>Choose two checkpoints. Every tensor of both is '
        "read; large ones take a while.</p></div>"
    )


def write_page(path: Path, text: str) -> None:
    """Write a page to a file.

    Raises:
        StoreError: The file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(
            f"cannot write `{path}`: {error.strerror}", hint=f"ls -ld {shell_quote(path.parent)}"
        ) from error
