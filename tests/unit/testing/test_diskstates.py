"""The model leaves what POSIX allows: no less, or bugs are missed; no more, or it cries wolf."""

from random import Random

import pytest

from resilient.testing.disk_model import BLOCK_BYTES, Disk, FileOp, FileOpKind
from tests.helpers.seeds import draw

TEMPORARY, FINAL = ("folder", "tmp"), ("folder", "final")
CONTENT = b"content"
MADE = {"folder": {}}


def left(ops, tree=None, lies=None, limit=1000, seed=1):
    disk = Disk(tree if tree is not None else MADE, lies)
    for op in ops:
        disk.apply(op)
    return [state.tree for state in disk.states(Random(seed), limit)]


def written(*, synced=True):
    ops = [
        FileOp(FileOpKind.CREATE, TEMPORARY, file=0),
        FileOp(FileOpKind.WRITE, file=0, data=CONTENT),
    ]
    return [*ops, FileOp(FileOpKind.SYNC, file=0)] if synced else ops


def folders(trees):
    return [tree["folder"] for tree in trees]


def names(trees):
    return {frozenset(one) for one in folders(trees)}


def test_a_file_that_was_synced_may_have_lost_its_name():
    assert folders(left(written())) == [{}, {"tmp": CONTENT}]


def test_unsynced_content_may_be_missing_torn_zero_garbage_or_there():
    found = {one.get("tmp") for one in folders(left(written(synced=False)))}
    assert found >= {None, b"", CONTENT, CONTENT[:3], bytes(7), b"\xa5" * 7}


def test_blocks_reach_the_disk_in_any_order():
    data = b"a" * BLOCK_BYTES + b"b" * BLOCK_BYTES
    ops = [
        FileOp(FileOpKind.CREATE, TEMPORARY, file=0),
        FileOp(FileOpKind.WRITE, file=0, data=data),
    ]
    found = {one.get("tmp", b"") for seed in range(40) for one in folders(left(ops))}
    disk = Disk(MADE)
    for op in ops:
        disk.apply(op)
    for seed in range(40):
        found |= {state.tree["folder"].get("tmp", b"") for state in disk.states(Random(seed), 1000)}
    assert data[:BLOCK_BYTES] in found
    assert bytes(BLOCK_BYTES) + data[BLOCK_BYTES:] in found


def test_a_rename_happened_or_not_and_the_creation_before_it_for_itself():
    ops = [*written(), FileOp(FileOpKind.REPLACE, TEMPORARY, FINAL)]
    assert names(left(ops)) == {frozenset(), frozenset(["tmp"]), frozenset(["final"])}


def test_a_rename_replaces_and_never_loses_both():
    ops = [*written(), FileOp(FileOpKind.REPLACE, TEMPORARY, FINAL)]
    trees = folders(left(ops, {"folder": {"final": b"old"}}))
    assert {one["final"] for one in trees} == {b"old", CONTENT}


def test_a_renamed_file_without_a_sync_may_be_torn():
    ops = [*written(synced=False), FileOp(FileOpKind.REPLACE, TEMPORARY, FINAL)]
    assert {one.get("final") for one in folders(left(ops))} >= {None, b"", CONTENT[:3], CONTENT}


def test_names_are_settled_by_the_sync_of_their_folder():
    ops = [
        *written(),
        FileOp(FileOpKind.REPLACE, TEMPORARY, FINAL),
        FileOp(FileOpKind.SYNC_FOLDER, ("folder",)),
    ]
    assert left(ops) == [{"folder": {"final": CONTENT}}]


def test_a_sync_of_a_folder_does_not_settle_its_own_name():
    ops = [FileOp(FileOpKind.MAKE_FOLDER, ("new",)), FileOp(FileOpKind.SYNC_FOLDER, ("new",))]
    assert left(ops, {}) == [{}, {"new": {}}]
    assert left([*ops, FileOp(FileOpKind.SYNC_FOLDER)], {}) == [{"new": {}}]


def test_a_sync_of_a_folder_does_not_settle_content():
    ops = [*written(synced=False), FileOp(FileOpKind.SYNC_FOLDER, ("folder",))]
    assert {one["tmp"] for one in folders(left(ops))} >= {b"", CONTENT}


def test_a_removed_name_may_come_back():
    trees = left([FileOp(FileOpKind.UNLINK, FINAL)], {"folder": {"final": b"old"}})
    assert folders(trees) == [{"final": b"old"}, {}]


def test_a_link_and_the_end_of_the_other_name_are_two_operations():
    ops = [
        *written(),
        FileOp(FileOpKind.LINK, TEMPORARY, FINAL),
        FileOp(FileOpKind.UNLINK, TEMPORARY),
    ]
    both = frozenset(["tmp", "final"])
    assert names(left(ops)) == {frozenset(), both, frozenset(["tmp"]), frozenset(["final"])}


def test_operations_in_two_folders_are_lost_independently():
    tree = {"one": {"x": b"1"}, "two": {"y": b"2"}}
    trees = left(
        [FileOp(FileOpKind.UNLINK, ("one", "x")), FileOp(FileOpKind.UNLINK, ("two", "y"))], tree
    )
    assert len(trees) == 4
    assert {"one": {"x": b"1"}, "two": {}} in trees
    assert {"one": {}, "two": {"y": b"2"}} in trees


def test_equal_trees_have_equal_digests_and_others_others():
    disk = Disk(MADE)
    for op in written(synced=False):
        disk.apply(op)
    states = list(disk.states(Random(2), 1000))
    by_digest = {state.digest: state.tree for state in states}
    assert all(by_digest[state.digest] == state.tree for state in states)
    assert len(by_digest) == len({repr(state.tree) for state in states})


def test_the_same_contents_under_other_names_have_another_digest():
    """Digests are sums: those of names and contents that are swapped must not be equal."""
    ops = [
        FileOp(FileOpKind.MAKE_FOLDER, ("folder",)),
        *(
            FileOp(FileOpKind.CREATE, ("folder", f"tmp{number}"), file=number)
            for number in range(3)
        ),
        *(FileOp(FileOpKind.WRITE, file=number, data=b"x" * 208) for number in range(3)),
    ]
    for _ in range(20):
        ops[2] = FileOp(FileOpKind.CREATE, ("folder", f"tmp-{draw().random()}"), file=1)
        assert len(left(ops, {}, limit=4000)) == 1 + (1 + 5) ** 3


def test_to_ask_at_every_moment_is_to_ask_at_the_last_one_alone():
    """What was found settled before may have changed since, in any folder of it."""
    top, folder, name = ("top",), ("top", "folder"), ("top", "folder", "tmp")
    ops = [
        FileOp(FileOpKind.MAKE_FOLDER, top),
        FileOp(FileOpKind.MAKE_FOLDER, folder),
        FileOp(FileOpKind.SYNC_FOLDER, top),
        FileOp(FileOpKind.SYNC_FOLDER, ()),
        FileOp(FileOpKind.CREATE, name, file=0),
        FileOp(FileOpKind.SYNC_FOLDER, folder),
        FileOp(FileOpKind.WRITE, file=0, data=CONTENT),
        FileOp(FileOpKind.SYNC, file=0),
        FileOp(FileOpKind.UNLINK, name),
    ]
    asked = Disk({})
    for count, op in enumerate(ops, 1):
        asked.apply(op)
        seen = [state.tree for state in asked.states(Random(1), 1000)]
        fresh = left(ops[:count], {})
        assert sorted(map(repr, seen)) == sorted(map(repr, fresh))


def test_a_state_that_is_known_is_told_without_its_tree():
    disk = Disk(MADE)
    for op in written(synced=False):
        disk.apply(op)
    digests = [state.digest for state in disk.states(Random(2), 1000)]
    again = list(disk.states(Random(2), 1000, set(digests[1:])))
    assert [state.digest for state in again] == digests
    assert [state.tree is None for state in again] == [False] + [True] * (len(digests) - 1)


def test_too_many_states_are_drawn_and_both_ends_are_among_them():
    ops = [FileOp(FileOpKind.MAKE_FOLDER, (str(number),)) for number in range(12)]
    trees = left(ops, {}, limit=20)
    assert 12 < len(trees) <= 20
    assert trees[0] == {}
    assert len(trees[-1]) == 12


def test_a_disk_that_lies_forgets_what_it_said_to_have_synced():
    ops = [
        *written(),
        FileOp(FileOpKind.REPLACE, TEMPORARY, FINAL),
        FileOp(FileOpKind.SYNC_FOLDER, ("folder",)),
    ]
    assert {} in folders(left(ops, lies=lambda: True))
    assert {"final": b""} in folders(left(ops, lies=lambda: True))


def test_a_rename_between_folders_is_refused_for_the_model_does_not_know_it():
    disk = Disk({"one": {"x": b"1"}, "two": {}})
    with pytest.raises(NotImplementedError):
        disk.apply(FileOp(FileOpKind.REPLACE, ("one", "x"), ("two", "x")))
