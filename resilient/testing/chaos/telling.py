"""What ranks and agents told, read again and again while they tell more."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Telling:
    """The events of a job: those of rank 0 from wherever it lived, in the order of telling.

    Args:
        folders: of event files, one for each host.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)
        self._paths = [one / "rank-0.jsonl" for one in folders]
        self._read_bytes = [0] * len(self._paths)
        self._told: list[dict[str, Any]] = []

    def facts(self) -> list[dict[str, Any]]:
        """Return them, without a last line that is not whole; what was returned once stays."""
        fresh: list[dict[str, Any]] = []
        for nth, path in enumerate(self._paths):
            if path.exists():
                with path.open("rb") as file:
                    file.seek(self._read_bytes[nth])
                    whole = file.read().rpartition(b"\n")[0]
                self._read_bytes[nth] += len(whole) + bool(whole)
                lines = whole.decode("utf-8", "replace").splitlines()
                fresh += [json.loads(line) for line in lines if line.endswith("}")]
        # Sorted only among what is new: a clock that jumps mixes up no more than that.
        self._told += sorted(fresh, key=lambda one: str(one.get("at", "")))
        return list(self._told)

    def worlds(self) -> tuple[int, ...]:
        """Return of how many ranks all lives were, by what their agents told, each number once."""
        found = set()
        for path in (one / "agent.jsonl" for one in self._folders):
            text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
            told = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
            started = [one for one in told if one["event"] == "WorkerGroupStarted"]
            found |= {int(one["world_size"]) for one in started}
        return tuple(sorted(found))
