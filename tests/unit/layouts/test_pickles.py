"""Pickles are walked as data: nothing is imported or called, and everything is bounded."""

from __future__ import annotations

import os
import pickle
import struct
from collections import OrderedDict

import pytest

from resilient.layouts import pickle_reader
from resilient.layouts.model import Unreadable
from resilient.layouts.pickle_names import is_data, rebuild
from resilient.layouts.pickle_reader import PickledCall, PickledGlobal, leaves, read_pickle

PLAIN = {
    "none": None,
    "flags": [True, False],
    "numbers": (1, -2, 2**40, -(2**70), 1.5, float("inf")),
    "texts": ["a", "\u00fc", b"bytes", ""],
    7: {"deep": {"deeper": [()]}},
    (1, "two"): 3,
    "long": list(range(3000)),
}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_come_out_as_the_library_reads_them(protocol):
    # Before protocol 3 bytes are a call of codecs, which only `rebuild` understands.
    assert read_pickle(pickle.dumps(PLAIN, protocol), rebuild).value == PLAIN


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_what_is_shared_in_it_stays_shared(protocol):
    shared = ["one"]
    found = read_pickle(pickle.dumps([shared, shared], protocol)).value
    assert found[0] is found[1]


def test_an_ordered_dict_is_a_dict():
    found = read_pickle(pickle.dumps(OrderedDict(a=1, b=2), 2), rebuild)
    assert found.value == {"a": 1, "b": 2}
    assert found.names == {PickledGlobal("collections", "OrderedDict")}


class Bomb:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (self.mark,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_what_it_would_call_is_named_and_not_called(protocol, tmp_path):
    mark = str(tmp_path / "executed")
    found = read_pickle(pickle.dumps({"weights": Bomb(mark)}, protocol), rebuild)
    made = found.value["weights"]
    assert (type(made), made.name.name, made.args) == (PickledCall, "mkdir", (mark,))
    assert not any(is_data(name) for name in found.names if name.name == "mkdir")
    assert not (tmp_path / "executed").exists()


def test_a_module_that_it_names_is_not_imported():
    import sys

    assert "antigravity" not in sys.modules
    read_pickle(b"cantigravity\nfly\n.", rebuild)
    assert "antigravity" not in sys.modules


def test_a_tuple_of_tuples_is_no_key():
    # Its hash takes twice as long with every level; with 60 of them it would never come to an end.
    levels = b"".join(b"\x86\x940h" + bytes([at]) + b"h" + bytes([at]) for at in range(1, 20))
    bomb = b"\x80\x04}\x94NN" + levels + b"\x86K\x01s."
    with pytest.raises(Unreadable, match="as a key"):
        read_pickle(bomb)


def test_a_number_that_collides_with_all_others_is_no_key():
    with pytest.raises(Unreadable, match="as a key"):
        read_pickle(pickle.dumps({2**61 - 1: 1}))


def test_lists_that_double_forty_times_are_cut_short():
    doubled = b"\x80\x04]\x94" + b"".join(
        b"]\x94(h" + bytes([at]) + b"h" + bytes([at]) + b"e" for at in range(40)
    )
    value = read_pickle(doubled + b".").value
    with pytest.raises(Unreadable):
        for _ in leaves(value):
            pass


def test_values_nested_without_end_are_refused_and_not_recursed_into():
    value = read_pickle(b"\x80\x04N" + b"\x85" * 1_000_000 + b".").value
    with pytest.raises(Unreadable, match="more than 64 levels"):
        list(leaves(value))


def test_a_value_that_holds_itself_is_cut_short():
    with pytest.raises(Unreadable):
        list(leaves(read_pickle(b"\x80\x04]\x94h\x00a.").value))


def test_more_opcodes_than_any_checkpoint_are_refused(monkeypatch):
    monkeypatch.setattr(pickle_reader, "OPCODES_MAX", 100)
    assert read_pickle(b"N" + b"\x85" * 98 + b".")
    with pytest.raises(Unreadable, match="opcodes"):
        read_pickle(b"N" + b"\x85" * 99 + b".")


def test_more_bytes_than_any_checkpoint_are_refused(monkeypatch):
    monkeypatch.setattr(pickle_reader, "BYTES_MAX", 100)
    with pytest.raises(Unreadable, match="bytes"):
        read_pickle(pickle.dumps("a" * 100))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"N",
        b"\x80\x05",
        b"R.",
        b"(.",
        b"Nb.",
        b"]K\x01K\x02s.",
        b"h\x05.",
        b"\x82\x01.",
        b"X" + struct.pack("<I", 1 << 31) + b"a.",
        b"\x8e" + struct.pack("<Q", 1 << 60) + b"a.",
        b"\x8b" + struct.pack("<i", -5) + b".",
        b"I" + b"9" * 6000 + b"\n.",
        b"K\x01K\x02\x93.",
    ],
)
def test_what_is_no_pickle_is_refused_with_a_reason(data):
    with pytest.raises(Unreadable, match=r"\w"):
        read_pickle(data, rebuild)


def test_a_cut_pickle_is_refused_wherever_it_is_cut():
    data = pickle.dumps(PLAIN, 4)
    for length in range(0, len(data) - 1, 7):
        with pytest.raises(Unreadable):
            read_pickle(data[:length], rebuild)
