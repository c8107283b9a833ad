"""Trees are spelled as Python's json spells them, however they are put together."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.format.state_json import JsonRows
from resilient.state_dict.save_planner import document_to_json, is_same_json, tree_to_json

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
    assert document_to_json(tree) == json.dumps(tree, sort_keys=True, indent=2) + "\n"


@pytest.mark.slow
@given(st.dictionaries(st.text(), TREES))
def test_a_document_with_rows_is_what_json_says_of_their_trees(tree):
    rows = [{"step": 1, "loss": 0.5}, {"step": 2}]
    text = json.dumps(rows, sort_keys=True, indent=2)[2:-2]
    shown = JsonRows("\n".join("  " + line for line in text.split("\n")))
    whole = json.dumps({**tree, "log": rows}, sort_keys=True, indent=2)
    assert document_to_json({**tree, "log": shown}) == whole + "\n"


@given(TREES, TREES)
def test_what_is_alike_has_one_text(one, other):
    assert is_same_json(one, json.loads(tree_to_json(one)))
    assert is_same_json(one, other) == (tree_to_json(one) == tree_to_json(other))


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
    assert not is_same_json(one, other)
    assert is_same_json(one, json.loads(json.dumps(one)))
