"""Page of ``resilient report -o`` and ``resilient ui``, assembled from sections."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from resilient.errors import StoreError
from resilient.redaction import shell_quote
from resilient_cli.output import human_size
from resilient_cli.page.assets import foot_of, head_of, style
from resilient_cli.page.checkpoints import attempts_part, repository_part
from resilient_cli.page.svg import curve, timeline
from resilient_cli.page.tables import scroll, table, text
from resilient_cli.views.goodput import EVENTS_COMMAND, NO_EVENTS_NOTE, moment, span_of
from resilient_cli.views.text import NONE, count, duration, share

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from resilient.goodput.report import GoodputReport
    from resilient_cli.views.listing import Listing

_SAVED_SHOWN = 50


def run_part(goodput: GoodputReport) -> str:
    """Return the section about a run: time, attempts, loss, faults and saves."""
    return "".join(
        [
            _tiles(goodput),
            "<h3>Where the time went</h3>",
            _bar(goodput),
            _classes(goodput),
            "<h3>Lives</h3>",
            "<p>Triangles are faults, notches are checkpoints; point at a mark for its name.</p>",
            scroll(timeline(goodput)),
            "<h3>Loss</h3>",
            "<p>Attempts alternate between two colours; grey steps were rolled back or lost.</p>",
            scroll(curve(goodput)),
            "<h3>Faults</h3>",
            _faults(goodput),
            "<h3>Saves</h3>",
            _checkpoints(goodput),
        ]
    )


def _tiles(goodput: GoodputReport) -> str:
    progress = goodput.now
    unit = f" / {progress.max_steps}" if progress.max_steps else ""
    tiles = (
        (share(goodput.goodput, 1), "goodput"),
        (duration(goodput.wall_ms), "wall clock"),
        (f"{progress.step}{unit}", "steps"),
        (str(goodput.lost_steps), "steps lost"),
        (str(len(goodput.faults)), "faults"),
        (str(len(goodput.doings)), "lives"),
    )
    cells = "".join(
        f'<div class="tile"><b>{text}</b><span>{unit}</span></div>' for text, unit in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _bar(goodput: GoodputReport) -> str:
    cells = "".join(
        f'<i class="c-{kind.value}" style="width:{100 * length / goodput.wall_ms:.2f}%"'
        f' title="{kind.value} {duration(length)}"></i>'
        for kind, length in goodput.spent_ms.items()
        if length
    )
    return f'<div class="bar">{cells}</div>'


def _classes(goodput: GoodputReport) -> str:
    rows = [
        (
            f'<i class="dot c-{kind.value}"></i>{kind.value.replace("_", " ")}',
            duration(length),
            share(length, goodput.wall_ms),
        )
        for kind, length in goodput.spent_ms.items()
        if length
    ]
    rows.append(("all", duration(goodput.wall_ms), share(goodput.wall_ms, goodput.wall_ms)))
    return table(("class", "time", "share"), rows, numbers=(1, 2))


def _faults(goodput: GoodputReport) -> str:
    if not goodput.faults:
        return "<p>None.</p>"
    causes = [
        (
            text(cause),
            str(repair.count),
            duration(repair.mttr_ms),
            str(repair.lost_steps),
            duration(repair.lost_ms),
        )
        for cause, repair in goodput.repairs.items()
    ]
    rows = [
        (
            str(fault.life),
            duration(fault.at_ms - goodput.began_ms),
            text(fault.cause),
            text(fault.host or NONE) + (f", rank {fault.rank}" if fault.rank >= 0 else ""),
            text(fault.detail or NONE),
            duration(fault.down_ms),
            str(fault.lost_steps),
            duration(fault.lost_ms),
        )
        for fault in goodput.faults
    ]
    head = ("attempt", "after", "cause", "where", "detail", "down", "lost steps", "lost time")
    return table(
        ("cause", "faults", "mean time to repair", "lost steps", "lost time"),
        causes,
        numbers=(1, 2, 3, 4),
    ) + table(head, rows, numbers=(5, 6, 7))


def _checkpoints(goodput: GoodputReport) -> str:
    if not goodput.saved:
        return "<p>None.</p>"
    written_bytes = sum(save.written_bytes for save in goodput.saved)
    rows = [
        (
            text(save.checkpoint),
            duration(save.at_ms - goodput.began_ms),
            human_size(save.size_bytes),
            human_size(save.written_bytes),
            duration(save.commit_ms),
            duration(save.stall_ms),
        )
        for save in goodput.saved[-_SAVED_SHOWN:]
    ]
    limit_text = f", the last {_SAVED_SHOWN} of them" if len(goodput.saved) > _SAVED_SHOWN else ""
    summary = (
        f"<p>{count(len(goodput.saved), 'checkpoint')}, {human_size(written_bytes)} "
        f"written{limit_text}.</p>"
    )
    head = ("checkpoint", "after", "size", "written", "durable in", "training waited")
    return summary + table(head, rows, numbers=(1, 2, 3, 4, 5))


_FILE_LIMIT_NOTE = "This page is a file, and was written without them. Use"


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
    goodput: GoodputReport,
    name: str,
    repository: Listing | None = None,
    version: str = "",
    extras: Extras | None = None,
) -> str:
    """Return the complete page of a run, which loads nothing else.

    Args:
        goodput: Goodput report of the run.
        name: Name of the run, as given.
        repository: Contents of the repository; None if unknown.
        version: Version of a served page, which checks for a newer version; empty in a file.
        extras: Further parts of a page in a file.
    """
    page_extras = extras or Extras()
    is_served, has_events = (
        bool(version),
        bool(goodput.doings or goodput.launches or repository is None),
    )
    views = [
        PageSection(
            "run", "Run", run_part(goodput) if has_events else _no_events_html(), is_live=True
        ),
        PageSection(
            "checkpoints",
            "Checkpoints",
            _checkpoints_part(repository, page_extras, is_served=is_served),
        ),
    ]
    if repository and is_served:
        views += [
            PageSection("tensors", "Tensors", _checkpoint_choice(repository)),
            PageSection("compare", "Compare", _pair(repository)),
        ]
    elif repository:
        tensors = page_extras.tensors or _missing_part(
            "resilient report RUN -o FILE --tensors latest"
        )
        comparison_html = page_extras.compared or _missing_part(
            "resilient report RUN -o FILE --compare A B"
        )
        views += [
            PageSection("tensors", "Tensors", tensors),
            PageSection("compare", "Compare", comparison_html),
        ]
    ends = (moment(goodput.began_ms), moment(goodput.ended_ms))
    if repository and not has_events:
        ends = span_of(repository)
    subtitle = f"{ends[0]} to {ends[1]}"
    return whole_page(name, subtitle, views, version)


def _no_events_html() -> str:
    return f"<p>{NO_EVENTS_NOTE}</p><p><code>{EVENTS_COMMAND}</code></p>"


def whole_page(name: str, subtitle: str, views: Sequence[PageSection], version: str = "") -> str:
    """Return a page of several sections.

    Args:
        name: Title of the page.
        subtitle: Line below the title.
        views: Sections, in order.
        version: Version of a served page.
    """
    links = "".join(f'<a href="#{view.id}">{view.name}</a>' for view in views)
    nav = f'<nav aria-label="parts of the page">{links}</nav>' if len(views) > 1 else ""
    body = "".join(_section(view) for view in views)
    live_attributes = ' id="when" data-live' if version else ""
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"{head_of(version)}<title>{text(name)}</title><style>{style()}</style></head>"
        '<body><a class="skip" href="#main">To the content</a>'
        f"<header><div><h1>{text(name)}</h1><p{live_attributes}>{subtitle}</p></div>{nav}</header>"
        f'<main id="main" tabindex="-1">{body}</main>{foot_of(version)}</body></html>\n'
    )


def _section(section: PageSection) -> str:
    live_attributes = f' id="{section.id}-live" data-live' if section.is_live else ""
    return (
        f'<section class="view" id="{section.id}" aria-labelledby="{section.id}-name">'
        f'<h2 id="{section.id}-name" class="top" tabindex="-1">{section.name}</h2>'
        f"<div{live_attributes}>{section.body}</div></section>"
    )


def _checkpoints_part(repository: Listing | None, more: Extras, *, is_served: bool) -> str:
    if repository is None:
        return "<p>No repository of checkpoints is in this folder.</p>"
    live_attributes = [
        f' id="{part_id}-live" data-live' if is_served else "" for part_id in ("stored", "lives")
    ]
    part_html = repository_part(repository, is_served=is_served, verdicts=more.checked)
    verification_html = '<div id="verify-room" class="room"></div>' if is_served else more.verified
    return (
        f"<div{live_attributes[0]}>{part_html}</div>{verification_html}"
        f"<div{live_attributes[1]}>{attempts_part(repository)}</div>"
    )


def _missing_part(command: str) -> str:
    live_command = "resilient ui RUN"
    commands_html = f"<p><code>{live_command}</code></p><p><code>{command}</code></p>"
    return f"<p>{_FILE_LIMIT_NOTE}</p>{commands_html}"


def _options(repository: Listing, selected_name: str) -> str:
    options = []
    for survey in repository.surveys:
        name = survey.checkpoint.folder
        if survey.manifest is not None:
            mark = " selected" if name == selected_name else ""
            options.append(f'<option value="{name}"{mark}>{name}</option>')
    return "".join(options)


def _checkpoint_choice(repository: Listing) -> str:
    selected_name = repository.resume.folder if repository.resume else ""
    return (
        '<div class="tools"><label>Checkpoint <select id="of" data-live>'
        f"{_options(repository, selected_name)}</select></label></div>"
        "<p>Open a row to see how the numbers of a tensor are spread.</p>"
        '<div id="tensors-room" class="room"></div>'
    )


def _pair(repository: Listing) -> str:
    names = [survey.checkpoint.folder for survey in repository.surveys if survey.manifest]
    selected_name = repository.resume.folder if repository.resume else names[0] if names else ""
    place = names.index(selected_name) if selected_name in names else 0
    older_name = names[min(place + 1, len(names) - 1)] if names else ""
    return (
        '<form class="tools"><label>A <select id="a" data-live>'
        f"{_options(repository, older_name)}</select></label>"
        f'<label>B <select id="b" data-live>{_options(repository, selected_name)}</select></label>'
        '<button class="act">Compare</button></form>'
        '<div id="compare-room" class="room"><p>Choose two checkpoints. Every tensor of both is '
        "read; large tensors take a while.</p></div>"
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
