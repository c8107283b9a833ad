"""The damage matrix as a page, and its contradictions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from tests.damage.contradictions import EVERY_KIND
from tests.damage.matrix import UNSEEN, Cell
from tests.damage.repairs import COPY, MENDS, STAYS
from tests.damage.sharded import ALL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.damage.matrix import Said

_TEMPORARY = re.compile(r"(?:/tmp)?/tmp[0-9a-z_]{8}(?=/)")
PAGE = Path(__file__).parents[2] / "docs" / "damage-matrix.md"
_NO_SUM = "safetensors files have no checksum"
BEYOND: dict[tuple[str, str], str] = {
    **{
        (name, "weights: bit flip in a number"): _NO_SUM
        for name in ("Trainer", "accelerate", "save_pretrained", "safetensors")
    },
    ("accelerate", "state: missing"): "only the script defines how many objects it registers",
    ("accelerate", "optimizer: of another step"): (
        "no other file in the folder counts the optimizer's updates"
    ),
    **{
        (name, "optimizer: two ranks' exchanged"): "a rank's file does not name its rank"
        for name in ("Trainer, ZeRO 2", "Trainer, ZeRO 3")
    },
    ("Megatron, two files", "weights: a file of slices of another step"): (
        "slices of weights do not name their step"
    ),
    ("Universal", "weights: swapped with the optimizer"): (
        "each file has one tensor of the same shape, and does not name its role"
    ),
    **{
        (name, f"ledger: {what}"): "resume does not read the ledger; `resilient audit` verifies it"
        for name in ("ours", "ours, parity")
        for what in ("missing", "bit flip")
    },
}
"""Reason why a damage cannot be detected, by layout and damage."""
_WORDS = {"no": "no", "partly": "loss", "unknown": "unknown", UNSEEN: "**unseen**", "yes": "told"}
_SAID_MAX = 160
_UNDETECTED = (
    "`ckpt verify` cannot detect the following damage. Each line names the layout, the damage and "
    "the reason."
)
_HEAD = """# Damage matrix

This page shows the result of each kind of damage in each layout. A layout is a checkpoint \
format of a tool. "Ours" is the format of this project. A cell has up to three results, \
separated by `/`: `ckpt verify`, the layout's own tool, and `ckpt repair`.

| `ckpt verify` | meaning |
|---|---|
| `no` | training cannot resume; the output has the reason |
| `loss` | training can resume; the output names the lost state |
| `told` | training can resume; the output names a contradiction |
| `unknown` | the command recognises no checkpoint |
| `unseen` | no damage is reported |

| layout's own tool | meaning |
|---|---|
| `stops` | the tool raises an error |
| `loads` | the tool loads the checkpoint without an error |
| `runs it` | the tool runs the code in the pickle |

| `ckpt repair` | meaning |
|---|---|
| `mends` | writes a whole checkpoint from this checkpoint and another step of the run |
| `loses` | writes a checkpoint with a named loss, or only weights for a new training |
| `saves` | writes only the intact tensors |
| `copy` | writes a whole checkpoint if `--from` names another copy |
| `stays` | writes nothing and gives the reason |

The layout's own tool loaded or resumed each repaired checkpoint. With `mends` and `copy`, the \
whole state has the same bits as before the damage. With `loses`, the weights have the same bits.

A cell is empty if the layout has no such file, or stores its content inside another file. \
`make damage` generates this page. A test in CI repeats some of the cells.
"""


def wrong(cells: Sequence[Cell]) -> list[str]:
    """Return the cells that contradict the page: undetected damage, wrong repairs, wrong hints."""
    found = []
    for one in cells:
        name = f"{one.sample}, {one.kind}: {one.answer}/{one.stock} ({one.told})"
        is_excused = (one.sample, one.kind) in BEYOND
        if is_excused:
            found += [f"{name} is excused and seen"] if one.answer != UNSEEN else []
        elif "WRONG" in one.repair:
            found.append(f"{name}: {one.repair}: {one.how}")
        elif one.answer == UNSEEN or (one.stock == "stops" and one.answer not in ("no", "unknown")):
            found.append(name)
        elif wrong_help(one):
            found.append(f"{name}: {one.repair}, and what is said to help is {one.fixes}")
    return found


def wrong_help(cell: Cell) -> bool:
    """Return whether the hints name a repair that fails, or omit a repair that works."""
    if cell.answer in (UNSEEN, "unknown"):
        return False
    if not cell.fixes or not all(cell.fixes):
        return True
    commands = [one for one in cell.fixes if not one.startswith("none")]
    repairs = [one for one in commands if one.startswith("resilient ckpt repair ")]
    if cell.repair == STAYS:
        return bool(repairs)
    return not commands and cell.repair != COPY


def rendered(cells: Sequence[Cell], whole: Mapping[str, Said]) -> str:
    by_place = {(one.sample, one.kind): one for one in cells}
    names = [one.name for one in ALL]
    kinds = dict.fromkeys(
        one.name for one in EVERY_KIND if any((name, one.name) in by_place for name in names)
    )
    lines = [_HEAD, _counted(cells), ""]
    lines += [f"| damage | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for kind in kinds:
        row = [_short(by_place.get((name, kind))) for name in names]
        lines.append(f"| {kind} | {' | '.join(row)} |")
    lines += ["", "## Undetected damage", "", _UNDETECTED, ""]
    lines += [f"* {name}, {kind}: {why}" for (name, kind), why in BEYOND.items()]
    lines += [
        "",
        "## The tools",
        "",
        "| layout | verdict on the undamaged checkpoint | own tool in these tests |",
        "|---|---|---|",
    ]
    lines += [f"| {one.name} | {_verdict(whole[one.name])} | {one.how} |" for one in ALL]
    lines += [
        "",
        "## Results in detail",
        "",
        "| layout | damage | result | first finding | repair |",
        "|---|---|---|---|---|",
    ]
    for one in cells:
        said = f"{_WORDS[one.answer]} | {_safe(one.told)} | {one.repair}: {_safe(one.how)}"
        lines.append(f"| {one.sample} | {one.kind} | {said} |")
    return "\n".join(lines) + "\n"


def _counted(cells: Sequence[Cell]) -> str:
    silent = sum(one.stock == "loads" and one.answer in ("no", "partly", "yes") for one in cells)
    mended = sum(one.repair == MENDS for one in cells)
    copied = sum(COPY in one.repair for one in cells)
    unseen = sum(one.answer == UNSEEN for one in cells)
    return (
        f"The table has {len(cells)} cells: {len({one.kind for one in cells})} kinds of damage in "
        f"{len({one.sample for one in cells})} layouts. In {silent} cells the layout's own tool "
        "loads the checkpoint, and only `ckpt verify` reports the damage. In "
        f"{unseen} cells `ckpt verify` reports no damage. `ckpt repair` "
        f"restores {mended} checkpoints without another copy, and {copied} more with another copy."
    )


def _verdict(said: Said) -> str:
    return {"yes": "yes", "partly": "yes with loss of ", "no": "no: "}[said.answer] + "; ".join(
        said.why
    )


def _short(cell: Cell | None) -> str:
    return "" if cell is None else f"{_WORDS[cell.answer]} / {cell.stock} / {cell.repair}"


def _safe(text: str) -> str:
    text = re.sub(r"[^\x20-\x7e]", "?", text.replace("|", "/"))
    # Without the path of the copies, equal answers always give the same page.
    text = _TEMPORARY.sub("", text)
    return text if len(text) <= _SAID_MAX else text[:_SAID_MAX].rpartition(" ")[0]


def read_page() -> dict[tuple[str, str], tuple[str, str]]:
    """Return the answer and the repair of each cell of the page."""
    lines = PAGE.read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("| damage |"))
    names = [one.strip() for one in lines[at].strip("|").split("|")][1:]
    found = {}
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            break
        kind, *row = [one.strip() for one in line.strip("|").split("|")]
        found |= {(name, kind): one for name, one in zip(names, row, strict=True) if one}
    parts = {key: one.split(" / ") for key, one in found.items()}
    return {key: (one[0], one[2]) for key, one in parts.items()}


def words_of(cell: Cell) -> tuple[str, str]:
    """Return the words of the page for the answer and the repair of a cell."""
    return _WORDS[cell.answer], cell.repair
