"""Metrics of a split for people and for scripts: ``log_metrics`` and ``save_metrics``."""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_DIGITS = 4


def shown(split: str, metrics: Mapping[str, Any]) -> str:
    """Return metrics as aligned lines under a heading, by name."""
    lines = {name: _short(name, value) for name, value in metrics.items()}
    names, values = max(map(len, lines), default=0), max(map(len, lines.values()), default=0)
    rows = [f"  {name:<{names}} = {lines[name]:>{values}}\n" for name in sorted(lines)]
    return "".join([f"***** {split} metrics *****\n", *rows])


def save(folder: Path, split: str, metrics: Mapping[str, Any], *, combined: bool) -> None:
    """Write ``<split>_results.json``, and add to ``all_results.json`` if ``combined``."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / f"{split}_results.json", metrics)
    if combined:
        path = folder / "all_results.json"
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        _write(path, {**before, **metrics})


def _write(path: Path, metrics: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(metrics, indent=4, sort_keys=True), encoding="utf-8")


def _short(name: str, value: Any) -> str:
    if "_mem_" in name:
        return f"{value >> 20}MB"
    if name.endswith("_runtime"):
        return str(dt.timedelta(seconds=round(value, 2)))
    if name == "total_flos":
        return f"{int(value) >> 30}GF"
    return f"{value:.{_DIGITS}f}" if isinstance(value, float) else str(value)
