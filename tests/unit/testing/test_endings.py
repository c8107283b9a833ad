import pytest
import torch

from resilient.testing.run_equality import differences

NAN = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([float("nan")]), NAN),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.tensor([1.0]), torch.tensor([[1.0]])),
        (1, 1.0),
        (1, True),
        ([1], (1,)),
        ([1, 2], [1]),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ],
)
def test_what_is_not_the_same_in_every_bit_differs(one, other):
    assert differences({"state": [0, one]}, {"state": [0, other]})


def test_equal_values_differ_nowhere_though_they_hold_nan():
    values = {"a": [NAN, (1, "x")], "b": {"c": float("nan")}, "d": None}
    again = {"a": [NAN.clone(), (1, "x")], "b": {"c": float("nan")}, "d": None}
    assert differences(values, again) == []


def test_a_difference_says_where():
    assert differences({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}) == ["/a/1/b: 2 and 3"]
