"""Entities in sequences of tags (IOB1, IOB2 and IOBES), and how many of them were found.

The rules are those of conlleval, as in seqeval's default mode: an entity is right when its type,
its first and its last token are.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_ENDS = frozenset({"E", "S"})
_BEGINS = frozenset({"B", "S"})


def entities(tags: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yield (type, first, last) of each entity in one sequence of tags such as ``B-PER``."""
    begin, before, kind_before = 0, "O", ""
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        is_open = before != "O"
        breaks = prefix == "O" or prefix in _BEGINS or before in _ENDS or kind != kind_before
        if is_open and breaks:
            yield kind_before, begin, place - 1
        if prefix != "O" and (breaks or not is_open):
            begin = place
        before, kind_before = prefix, kind


def entity_report(
    truth: Sequence[Sequence[str]], found: Sequence[Sequence[str]]
) -> dict[str, dict[str, float]]:
    """Return precision, recall, f1-score and support by type, and their averages.

    Args:
        truth: the right tags of each sequence.
        found: the tags that were predicted, as many.

    The names are those of scikit-learn's and seqeval's ``classification_report``: one entry per
    type, ``micro avg``, ``macro avg`` and ``weighted avg``. A ratio over nothing is 0.
    """
    right, guessed = _all(truth), _all(found)
    support, tried = (Counter(kind for kind, *_ in some) for some in (right, guessed))
    hits = Counter(kind for kind, *_ in right & guessed)
    kinds = sorted(support | tried)
    report = {kind: _row(hits[kind], tried[kind], support[kind]) for kind in kinds}
    rows = list(report.values())
    weights = np.array([row["support"] for row in rows])
    total = float(weights.sum())
    report["micro avg"] = _row(hits.total(), tried.total(), support.total())
    for name, shares in (("macro avg", np.ones(len(rows))), ("weighted avg", weights)):
        whole = max(float(shares.sum()), 1.0)
        means = {
            metric: float(np.dot([row[metric] for row in rows], shares)) / whole
            for metric in ("precision", "recall", "f1-score")
        }
        report[name] = {**means, "support": total}
    return report


def _all(sequences: Sequence[Sequence[str]]) -> set[tuple[str, int, int, int]]:
    return {
        (kind, number, first, last)
        for number, tags in enumerate(sequences)
        for kind, first, last in entities(tags)
    }


def _row(hits: int, tried: int, support: int) -> dict[str, float]:
    precision, recall = hits / max(tried, 1), hits / max(support, 1)
    f1 = 2 * precision * recall / (precision + recall) if hits else 0.0
    return {"precision": precision, "recall": recall, "f1-score": f1, "support": float(support)}
