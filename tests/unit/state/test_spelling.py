"""Trees are spelled as Python's json spells them, however they are put together."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.format.rows import Rows
from resilient.state.spelling import document_of, is_spelled_alike, text_of

PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
TREES = st.recursive(
    PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30
)


@given(TREES)
def test_a_document_is_what_json_says_of_it(tree):
    assert document_of(tree) == json.dumps(tree, sort_keys=True, indent=2) + "\n"


@given(st.dictionaries(st.text(), TREES))
def test_a_document_with_rows_is_what_json_says_of_their_trees(tree):
    rows = [{"step": 1, "loss": 0.5}, {"step": 2}]
    text = json.dumps(rows, sort_keys=True, indent=2)[2:-2]
    shown = Rows("\n".join("  " + line for line in text.split("\n")))
    whole = json.dumps({**tree, "log": rows}, sort_keys=True, indent=2)
    assert document_of({**tree, "log": shown}) == whole + "\n"


@given(TREES, TREES)
def test_what_is_alike_has_one_text(one, other):
    assert is_spelled_alike(one, json.loads(text_of(one)))
    assert is_spelled_alike(one, other) == (text_of(one) == text_of(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ([1, 2], [1, True]),
        ([1, 2], [1, 2, 3]),
        ([1, "a"], [1, "a", None]),
        ({"a": 1, "b": 1}, {"b": 1, "a": 1}),
        ({"a": [0]}, {"a": [0.0]}),
        ([], {}),
    ],
    ids=str,
)
def test_what_is_equal_and_spelled_otherwise_is_not_alike(one, other):
    assert not is_spelled_alike(one, other)
    assert is_spelled_alike(one, json.loads(json.dumps(one)))
