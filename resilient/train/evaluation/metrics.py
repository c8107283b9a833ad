"""Metrics by task for ``compute_metrics``, computed with NumPy alone.

Entities come from sequences of tags (IOB1, IOB2 and IOBES) by the rules of conlleval, as in
seqeval's default mode. An entity is right if its type, its first token and its last token are
right.

>>> compute_metrics = metrics_for("classification")
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from resilient.errors import ConfigError
from resilient.train.evaluation.gather import PADDING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from resilient.train.evaluation.loop import EvalPrediction

_ENDS = frozenset({"E", "S"})
_BEGINS = frozenset({"B", "S"})


def entities(tags: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yield (type, first, last) of each entity in one sequence of tags such as ``B-PER``."""
    begin, previous_prefix, kind_before = 0, "O", ""
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        is_open = previous_prefix != "O"
        breaks = (
            prefix == "O" or prefix in _BEGINS or previous_prefix in _ENDS or kind != kind_before
        )
        if is_open and breaks:
            yield kind_before, begin, place - 1
        if prefix != "O" and (breaks or not is_open):
            begin = place
        previous_prefix, kind_before = prefix, kind


def entity_report(
    truth: Sequence[Sequence[str]], predictions: Sequence[Sequence[str]]
) -> dict[str, dict[str, float]]:
    """Return precision, recall, f1-score and support by type, and their averages.

    Args:
        truth: Correct tags of each sequence.
        predictions: Predicted tags, of the same lengths.

    The names are those of scikit-learn's and seqeval's ``classification_report``: one entry per
    type, ``micro avg``, ``macro avg`` and ``weighted avg``. A ratio with denominator 0 is 0.
    """
    true_entities, predicted_entities = _all(truth), _all(predictions)
    support, predicted_counts = (
        Counter(kind for kind, *_ in tags) for tags in (true_entities, predicted_entities)
    )
    hits = Counter(kind for kind, *_ in true_entities & predicted_entities)
    kinds = sorted(support | predicted_counts)
    report = {kind: _row(hits[kind], predicted_counts[kind], support[kind]) for kind in kinds}
    rows = list(report.values())
    weights = np.array([row["support"] for row in rows])
    total = float(weights.sum())
    report["micro avg"] = _row(hits.total(), predicted_counts.total(), support.total())
    for name, shares in (("macro avg", np.ones(len(rows))), ("weighted avg", weights)):
        total_share = max(float(shares.sum()), 1.0)
        means = {
            metric: float(np.dot([row[metric] for row in rows], shares)) / total_share
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


TASKS = ("classification", "regression", "ner")
_AVERAGE = " avg"
_OVERALL = ("precision", "recall", "f1")


def metrics_for(
    task: str | None, id2label: Mapping[int, str] | None = None
) -> Callable[[EvalPrediction], dict[str, float]]:
    """Return a function that computes the metrics of a task.

    Args:
        task: ``classification`` (accuracy, f1 weighted by support), ``regression`` (mse, mae),
            ``ner``, or None for no metrics. ``ner`` gives precision, recall and f1 of whole
            entities, overall and by type. Labels of -100 do not count.
        id2label: For ``ner``: the tag of each class, such as ``B-PER`` and ``O``.

    Raises:
        ConfigError: There is no such task, or ``ner`` has no tags.
    """
    if task is None:
        return lambda _prediction: {}
    if task == "classification":
        return classification
    if task == "regression":
        return regression
    if task != "ner":
        raise ConfigError(f"no metrics are known for the task `{task}`: use {', '.join(TASKS)}")
    if id2label is None:
        raise ConfigError("the task `ner` needs `id2label`: the tag of each class")
    tags = dict(id2label)
    return lambda prediction: named_entities(prediction, tags)


def classification(prediction: EvalPrediction) -> dict[str, float]:
    """Return ``accuracy`` and ``f1``, the mean over classes weighted by their samples."""
    labels = np.asarray(prediction.label_ids)
    predictions = _scores(prediction).argmax(1)
    return {
        "accuracy": float((predictions == labels).mean()),
        "f1": _weighted_f1(labels, predictions),
    }


def regression(prediction: EvalPrediction) -> dict[str, float]:
    """Return ``mse`` and ``mae``: means of squared and of absolute errors."""
    labels = np.asarray(prediction.label_ids, dtype=np.float64)
    errors = _scores(prediction).astype(np.float64).reshape(labels.shape) - labels
    return {"mse": float((errors**2).mean()), "mae": float(np.abs(errors).mean())}


def named_entities(prediction: EvalPrediction, tags: Mapping[int, str]) -> dict[str, float]:
    """Return precision, recall and f1 of entities, overall and as ``<type>_<metric>``."""
    labels, predictions = np.asarray(prediction.label_ids), _scores(prediction).argmax(2)
    label_mask = labels != PADDING
    truth, guess = (
        [
            [tags[int(item)] for item in row[keep]]
            for row, keep in zip(rows, label_mask, strict=True)
        ]
        for rows in (labels, predictions)
    )
    report = entity_report(truth, guess)
    overall = report["micro avg"]
    metrics = {name: overall[f"{name}-score" if name == "f1" else name] for name in _OVERALL}
    metrics["accuracy"] = float((labels == predictions)[label_mask].mean())
    for kind, row in report.items():
        if not kind.endswith(_AVERAGE):
            metrics |= {
                f"{kind}_{name.removesuffix('-score')}": value for name, value in row.items()
            }
    return metrics


def _scores(prediction: EvalPrediction) -> np.ndarray[Any, Any]:
    """Return the first output, because a model may return more than its scores."""
    scores = prediction.predictions
    return np.asarray(scores[0] if isinstance(scores, tuple) else scores)


def _weighted_f1(labels: np.ndarray[Any, Any], predictions: np.ndarray[Any, Any]) -> float:
    classes, support = np.unique(labels, return_counts=True)
    hits = np.array([((predictions == label) & (labels == label)).sum() for label in classes])
    guessed = np.array([(predictions == label).sum() for label in classes])
    f1 = 2 * hits / np.maximum(guessed + support, 1)
    return float((f1 * support).sum() / support.sum())
