"""What checkpoints cost: how much of each is its own, and what they share."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from resilient_cli.page.drawing import WIDTH, Scale, opened
from resilient_cli.page.tables import legend, scroll
from resilient_cli.render import human_size
from resilient_cli.views.words import share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.format.manifest import Manifest
    from resilient_cli.views.listing import Listing

_SHOWN, _ROW = 30, 22
_LEFT, _RIGHT = 150, 230


def alone_bytes(found: Listing) -> dict[str, int]:
    """Return how much each checkpoint needs that no other one needs, by its folder."""
    users = Counter(
        one.manifest.key(file.name)
        for one in found.surveys
        if one.manifest
        for file in one.manifest.files
    )
    return {
        one.checkpoint.folder: sum(
            file.size_bytes
            for file in one.manifest.files
            if users[one.manifest.key(file.name)] == 1
        )
        for one in found.surveys
        if one.manifest
    }


def sizes(found: Listing) -> str:
    """Return what is stored, what it would be without sharing, and a bar for each checkpoint."""
    manifests = [one.manifest for one in found.surveys if one.manifest]
    if not manifests:
        return ""
    whole = sum(one.size_bytes for one in manifests)
    tiles = (
        (human_size(found.size_bytes), "stored"),
        (human_size(whole), "if each were whole"),
        (share(whole - found.size_bytes, whole), "saved by sharing"),
        (human_size(max(one.own_bytes for one in manifests)), "largest write"),
    )
    cells = "".join(f'<div class="tile"><b>{one}</b><span>{of}</span></div>' for one, of in tiles)
    return f'<div class="tiles">{cells}</div>{_legend()}{_bars(manifests)}'


def _legend() -> str:
    return legend(("own", "written by it"), ("shared", "in files of older ones"))


def _bars(manifests: list[Manifest]) -> str:
    shown = manifests[:_SHOWN]
    scale = Scale(0, max(1, *(one.size_bytes for one in shown)), _LEFT, WIDTH - _RIGHT)
    height = len(shown) * _ROW + 6
    parts = [opened("sizes", WIDTH, height, "size of each checkpoint")]
    for nth, one in enumerate(shown):
        parts += _bar(one, nth * _ROW + 3, scale)
    left = len(manifests) - len(shown)
    more = f"<p>and {left} older ones</p>" if left else ""
    return scroll("".join([*parts, "</svg>"])) + more


def _bar(one: Manifest, y: int, scale: Scale) -> Iterator[str]:
    own, end = scale(one.own_bytes), scale(one.size_bytes)
    shared = one.size_bytes - one.own_bytes
    told = f"{human_size(one.own_bytes)} of {human_size(one.size_bytes)} its own"
    yield f"<g><title>{one.checkpoint}: {told}</title>"
    yield f'<text class="name" x="{_LEFT - 8}" y="{y + 13}">{one.checkpoint}</text>'
    if one.own_bytes:
        width = max(1.0, round(own - _LEFT, 1))
        yield f'<rect class="own" x="{_LEFT}" y="{y}" width="{width}" height="16"/>'
    if shared:
        width = max(1.0, round(end - own, 1))
        yield f'<rect class="shared" x="{own}" y="{y}" width="{width}" height="16"/>'
    yield f'<text x="{end + 8}" y="{y + 13}">{told}</text></g>'
