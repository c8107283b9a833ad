from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score, mean_absolute_error, mean_squared_error

from resilient import EvalPrediction, metrics_for
from resilient.errors import ConfigError
from resilient.train.evaluation.metrics import entities, entity_report


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_classification_is_what_scikit_learn_says(seed):
    random = np.random.default_rng(seed)
    scores, labels = random.normal(size=(40, 5)), random.integers(0, 4, 40)
    found = scores.argmax(1)
    metrics = metrics_for("classification")(EvalPrediction((scores, None), labels))
    assert metrics["accuracy"] == pytest.approx(accuracy_score(labels, found))
    expected = f1_score(labels, found, average="weighted", zero_division=0)
    assert metrics["f1"] == pytest.approx(expected)


def test_regression_is_what_scikit_learn_says():
    random = np.random.default_rng(0)
    scores, labels = random.normal(size=(40, 1)), random.normal(size=40)
    metrics = metrics_for("regression")(EvalPrediction(scores, labels))
    assert metrics["mse"] == pytest.approx(mean_squared_error(labels, scores))
    assert metrics["mae"] == pytest.approx(mean_absolute_error(labels, scores))


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("B-A I-A O B-A", [("A", 0, 1), ("A", 3, 3)]),
        ("I-A I-A B-A I-B O", [("A", 0, 1), ("A", 2, 2), ("B", 3, 3)]),
        ("S-A B-A E-A I-A", [("A", 0, 0), ("A", 1, 2), ("A", 3, 3)]),
        ("O O", []),
        ("", []),
    ],
)
def test_entities_end_where_conlleval_ends_them(tags, found):
    assert list(entities(tags.split())) == found


def test_the_report_on_entities_is_the_one_that_seqeval_shows_for_its_example():
    truth = [["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    found = [["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    none = {"precision": 0.0, "recall": 0.0, "f1-score": 0.0, "support": 1.0}
    half = {"precision": 0.5, "recall": 0.5, "f1-score": 0.5, "support": 2.0}
    assert entity_report(truth, found) == {
        "MISC": none,
        "PER": {"precision": 1.0, "recall": 1.0, "f1-score": 1.0, "support": 1.0},
        **dict.fromkeys(("micro avg", "macro avg", "weighted avg"), half),
    }


def test_named_entities_leave_out_what_is_padded():
    tags = {0: "O", 1: "B-PER", 2: "I-PER"}
    labels = np.array([[1, 2, 0, -100], [0, 1, -100, -100]])
    guess = np.array([[1, 2, 0, 1], [0, 0, 1, 1]])
    metrics = metrics_for("ner", tags)(EvalPrediction(np.eye(3)[guess], labels))
    assert metrics == {
        "precision": 1.0,
        "recall": 0.5,
        "f1": pytest.approx(2 / 3),
        "accuracy": 0.8,
        "PER_precision": 1.0,
        "PER_recall": 0.5,
        "PER_f1": pytest.approx(2 / 3),
        "PER_support": 2.0,
    }


def test_nothing_found_and_nothing_there_is_no_division_by_zero():
    assert entity_report([["O"]], [["O"]])["weighted avg"]["f1-score"] == 0


def test_no_task_has_no_metrics_and_a_wrong_one_is_said():
    assert metrics_for(None)(EvalPrediction(1, 2)) == {}
    with pytest.raises(ConfigError, match="classification, regression, ner"):
        metrics_for("translation")
    with pytest.raises(ConfigError, match="id2label"):
        metrics_for("ner")
