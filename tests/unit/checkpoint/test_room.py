"""What a rank may take of its host's keeper, and what is more than there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilient.checkpoint.daemon import memory
from resilient.checkpoint.daemon.memory import LeasedBuffers, MemoryQuota, SharedMemoryPool
from resilient.errors import ConfigError, StoreFull
from resilient.storage.shared_memory import SharedFolder

PAGE = 4096


@pytest.fixture
def room(tmp_path):
    """Open rooms, and give their memory back."""
    opened = []

    def one(share):
        opened.append(SharedFolder(tmp_path))
        return SharedMemoryPool(opened[-1], share)

    yield one
    for folder in opened:
        folder.close()


@pytest.mark.parametrize(("is_auto", "error"), [(False, ConfigError), (True, StoreFull)])
def test_memory_is_given_up_to_the_bound_and_again_when_it_came_back(room, is_auto, error):
    given = room(MemoryQuota(3 * PAGE, is_auto=is_auto))
    first = given.take(PAGE)
    given.take(2 * PAGE)
    with pytest.raises(error, match=f"{4 * PAGE} bytes .* {3 * PAGE}"):
        given.take(PAGE)
    given.release(first)
    assert given.take(PAGE).size_bytes == PAGE


@pytest.mark.parametrize(
    ("share", "missing"),
    [(MemoryQuota(3 * PAGE), PAGE), (MemoryQuota(9 * PAGE), 2 * PAGE), (MemoryQuota(), 2 * PAGE)],
    ids=["over the bound", "within it", "no bound"],
)
def test_what_is_missing_is_what_is_over_the_bound_or_else_all_of_it(room, share, missing):
    """Within the bound it is the machine that has no more."""
    given = room(share)
    given.take(2 * PAGE)
    assert given.missing_bytes(2 * PAGE) == missing


def test_ranks_share_a_bound_evenly():
    share = MemoryQuota(8 * PAGE, ranks=2)
    assert share.has_room(4 * PAGE)
    assert not share.has_room(4 * PAGE + 1)
    assert MemoryQuota().has_room(1 << 60)


def test_what_the_machine_gives_is_no_wish_while_the_trainer_has_memory(monkeypatch):
    share = MemoryQuota(PAGE, is_auto=True)
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 1 << 30)
    assert share.has_room(1 << 20)
    assert not MemoryQuota(PAGE).has_room(1 << 20)
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 1 << 20)
    assert not share.has_room(1 << 20)
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: None)
    assert not share.has_room(1 << 20)


class Reserving:
    """Answers as a keeper does, with files of a room."""

    def __init__(self, given):
        self.given, self.held, self.asked = given, {}, []

    def __call__(self, verb, **message):
        self.asked.append(verb)
        if verb == "release":
            for name in message["names"]:
                self.given.release(self.held.pop(name))
            return {}
        if verb == "missing":
            return {"size_bytes": self.given.missing_bytes(message["size_bytes"])}
        name = message["name"]
        if name in self.held:
            self.given.release(self.held.pop(name))
        self.held[name] = self.given.take(message["size_bytes"])
        return {"path": str(self.held[name].path), "size_bytes": self.held[name].size_bytes}


def test_a_file_that_grows_gets_more_than_it_needs_unless_the_bound_forbids_it(room):
    ask = Reserving(room(MemoryQuota(5 * PAGE)))
    mine = LeasedBuffers(ask)
    mine.share = MemoryQuota(5 * PAGE)
    mine.get("a", 2 * PAGE)
    mine.get("a", 3 * PAGE)
    assert ask.held["a"].size_bytes == 5 * PAGE
    ask.given.release(ask.held.pop("a"))
    other = LeasedBuffers(ask)
    other.get("b", 3 * PAGE)
    other.get("b", 4 * PAGE)
    assert ask.held["b"].size_bytes == 4 * PAGE


def test_what_was_given_back_for_more_that_was_refused_is_not_used_again(room):
    """A keeper gives the shorter one back before it takes the longer one."""
    ask = Reserving(room(MemoryQuota(4 * PAGE)))
    mine = LeasedBuffers(ask)
    mine.get("a", 2 * PAGE)
    with pytest.raises(ConfigError):
        mine.get("a", 5 * PAGE)
    mine.get("a", 2 * PAGE)[:1] = b"x"
    assert Path(ask.held["a"].path).read_bytes()[:1] == b"x"


def test_what_is_in_the_way_of_a_save_goes_once(room):
    given = room(MemoryQuota(4 * PAGE))
    steps, saves = LeasedBuffers(Reserving(given)), LeasedBuffers(Reserving(given))
    needed = []

    def make_room(size_bytes):
        needed.append(size_bytes)
        steps.release_all()
        return len(needed) == 1

    saves.release_other_memory = make_room
    saves.get("a", PAGE)
    steps.get("b", 2 * PAGE)
    saves.get("a", 4 * PAGE)
    assert needed == [2 * PAGE]
    assert not steps._buffers
    with pytest.raises(ConfigError):
        saves.get("c", PAGE)


def test_memory_of_files_that_are_no_more_goes_back_before_the_next_save(room):
    ask = Reserving(room(MemoryQuota(4 * PAGE)))
    mine = LeasedBuffers(ask)
    mine.share = MemoryQuota(4 * PAGE)
    mine.get("old", 3 * PAGE)
    assert mine.has_room({"new": 3 * PAGE})
    mine.get("new", 3 * PAGE)
    assert list(ask.held) == ["new"]
    assert mine.has_room({"new": 3 * PAGE})
    assert not mine.has_room({"new": 5 * PAGE})
    assert not ask.held
    assert ask.asked.count("release") == 2
