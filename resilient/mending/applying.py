"""A plan written: a new checkpoint, or what is left of one; the damaged one is only read."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from resilient.errors import ConfigError
from resilient.mending.drafts import Draft, Span
from resilient.mending.salvage import safetensors_pieces
from resilient.showing import quoted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resilient.mending.drafts import Piece
    from resilient.mending.planning import MendingPlan

REPORT = "repaired.json"
REPAIRED, SALVAGED = "repaired", "salvaged"


def place_of(plan: MendingPlan) -> Path:
    """Return where a plan is written when nobody says: beside the damaged one, under its name."""
    own = Path(plan.draft.url)
    return own.parent / (REPAIRED if plan.is_mended else SALVAGED) / own.name


def write_mended(plan: MendingPlan, target: Path) -> Path:
    """Write what a plan makes; of one that mends nothing, what is whole.

    Crash: a place beside ``target``, named ``.<name>.partial``; the damaged one is only read.

    Args:
        plan: of :func:`resilient.mending.planning.plan_mending`.
        target: must not be there yet.

    Raises:
        ConfigError: it is there, or there is nothing to write.
        StoreError: a place could not be read.
    """
    if target.exists():
        other = f"{target}-2"
        raise ConfigError(
            f"`{target}` is there already",
            hint=f"resilient ckpt repair {quoted(plan.url)} --apply --out {quoted(other)}",
        )
    if not plan.is_mended and not plan.salvaged:
        raise ConfigError(f"of `{plan.url}` nothing can be written")
    listing = plan.draft.list()
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.unlink(missing_ok=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    if plan.is_mended and listing.is_file:
        _write(plan.draft, next(iter(listing.sizes)), partial)
    else:
        _write_folder(plan, partial)
    partial.rename(target)
    _sync(target.parent)
    return target


def _write_folder(plan: MendingPlan, partial: Path) -> None:
    hurt = set() if plan.is_mended else {one.place for one in plan.after if one.is_fatal}
    for name in plan.draft.list().sizes:
        if name not in hurt:
            _write(plan.draft, name, partial / name)
    for one in () if plan.is_mended else plan.salvaged:
        name = f"{one.file}.salvaged.safetensors"
        _write_pieces(safetensors_pieces(one.saved), partial / name)
    partial.mkdir(parents=True, exist_ok=True)
    said = {
        "source": plan.url,
        "steps": [{"file": one.file, "what": one.what, "from": one.source} for one in plan.steps],
        "losses": dict(plan.losses),
        "refused": dict(plan.refused),
        "lost_tensors": {one.file: list(one.lost) for one in plan.salvaged},
    }
    text = json.dumps(said, indent=2, sort_keys=True) + "\n"
    (partial / REPORT).write_text(text, encoding="utf-8")
    _sync(partial)


def _write(draft: Draft, name: str, path: Path) -> None:
    _write_pieces(draft.pieces(name), path)


def _write_pieces(pieces: tuple[Piece, ...], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        for piece in pieces:
            file.writelines(_blocks(piece))
        file.flush()
        os.fsync(file.fileno())


def _blocks(piece: Piece) -> Iterable[bytes]:
    if isinstance(piece, Span):
        size = 4 << 20
        return (piece.read(at, size) for at in range(0, piece.size_bytes, size))
    return [piece]


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
