"""Text formatting that several views share."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from resilient_cli.output import age_seconds, human_age

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from resilient.format.keys import CheckpointId

NONE = "-"
_MINUTE, _SHORT = 59.95, 9.995


def count(number: int, noun: str, several: str = "") -> str:
    """Format a count: ``1 file``, ``2 files``; ``several`` is an irregular plural."""
    return f"{number} {noun if number == 1 else several or f'{noun}s'}"


def duration(length_ms: float | None) -> str:
    """Format a duration: ``0.25 s``, ``42.1 s``, ``3m 05s``, ``3d 04h``; a dash for None."""
    if length_ms is None:
        return NONE
    seconds = length_ms / 1000
    if seconds < _MINUTE:
        return f"{seconds:.2f} s" if seconds < _SHORT else f"{seconds:.1f} s"
    whole_seconds = round(seconds)
    for large, small, names in ((86400, 3600, "dh"), (3600, 60, "hm"), (60, 1, "ms")):
        if whole_seconds >= large:
            return (
                f"{whole_seconds // large}{names[0]} {whole_seconds % large // small:02d}{names[1]}"
            )
    return f"{whole_seconds} s"


def share(part: float, whole: float) -> str:
    """Format a share: ``81.2 %``; a dash if the whole is 0."""
    return f"{100 * part / whole:.1f} %" if whole else NONE


def folder(checkpoint: CheckpointId | None) -> str | None:
    """Return the folder of a checkpoint as a JSON value; None for no checkpoint."""
    return checkpoint.folder if checkpoint else None


def near_part_note(checkpoint: CheckpointId, absent_ranks: Sequence[int]) -> str:
    """Return a note on a checkpoint that lacks every file of some ranks and no other file."""
    ranks_text = f"rank{'s' if len(absent_ranks) > 1 else ''} {', '.join(map(str, absent_ranks))}"
    return (
        f"note: every file of {ranks_text} in {checkpoint} is missing, and all other files are "
        "intact. "
        "One host's part of a near tier looks like this. In that case nothing is lost: the other "
        "hosts hold the rest."
    )


def age(moment: str, now: str) -> str:
    """Format the age of a moment; a dash if it cannot be parsed."""
    seconds = age_seconds(moment, now)
    return NONE if seconds is None else human_age(seconds)


def inline(values: Mapping[str, Any]) -> str:
    """Format a mapping on one line."""
    return ", ".join(f"{name} {plain(value)}" for name, value in values.items()) or NONE


def plain(value: Any) -> str:
    """Format a JSON value; strings lose their quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def json_number(value: Any) -> Any:
    """Return a value that JSON can hold; other values, such as infinite numbers, become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list | tuple):
        return [json_number(item) for item in value]
    if isinstance(value, dict):
        return {str(key): json_number(item) for key, item in value.items()}
    return value if isinstance(value, bool | int | float | str | None) else str(value)
