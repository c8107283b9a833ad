"""Fields that are taken off an object at each step are those that it has then."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import pytest

from resilient.train.fast_asdict import CachedAsdict, fast_asdict


@dataclass
class Inner:
    sizes: list[int] = field(default_factory=lambda: [1, 2])


@dataclass
class Odd:
    flag: object = True
    number: object = 1
    text: str = "one"
    words: list[str] = field(default_factory=lambda: ["a"])
    counts: dict[str, int] = field(default_factory=lambda: {"a": 1})
    more: dict[str, object] = field(default_factory=lambda: {"deep": [1, {"er": 2}]})
    inner: Inner = field(default_factory=Inner)
    nothing: object = None


NAMES = tuple(Odd.__dataclass_fields__)


def another_number(one):
    one.number = 2


def a_flag_for_a_number(one):
    one.number = True


def a_list_that_grew(one):
    one.words.append("b")


def a_dict_that_grew(one):
    one.counts["b"] = 2


def something_deep(one):
    one.more["deep"][1]["er"] = 2.0


def something_of_a_dataclass(one):
    one.inner.sizes[0] = 7


CHANGES = [another_number, a_flag_for_a_number, a_list_that_grew, a_dict_that_grew,
           something_deep, something_of_a_dataclass]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
def test_what_is_taken_again_is_what_is_there_then(change):
    one, again = Odd(), CachedAsdict()
    first = again.of(one, NAMES)
    assert again.of(one, NAMES) is first
    before = repr(first)
    change(one)
    assert repr(again.of(one, NAMES)) == repr(asdict(one)) != before
    assert repr(first) == before, "what was given is of then"
    assert again.of(one, NAMES) is again.of(one, NAMES)


def test_what_is_copied_shares_nothing_and_is_in_the_order_of_the_names():
    one = Odd()
    found = fast_asdict(one, NAMES)
    assert repr(found) == repr(asdict(one))
    found["more"]["deep"].clear()
    found["inner"]["sizes"].clear()
    assert one == Odd()


def test_another_object_is_told():
    again = CachedAsdict()
    again.of(Odd(), NAMES)
    assert again.of(Odd(text="two"), NAMES)["text"] == "two"
