"""Folders of others are read by ranges, and nothing outside of them is ever opened."""

from __future__ import annotations

import os

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from resilient.errors import ConfigError, KeyNotFound
from resilient.storage import folder as folders
from resilient.storage.folder import open_folder

NAMES = {".metadata": b"index", "sub/with space.bin": b"0123456789", "a": b""}


@pytest.fixture(params=["local", "memory"])
def place(request, tmp_path):
    if request.param == "local":
        for name, data in NAMES.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(data)
        yield str(tmp_path)
        return
    service = MemoryFileSystem()
    for name, data in NAMES.items():
        service.pipe_file(f"/foreign/{name}", data)
    yield "memory://foreign"
    service.rm("/foreign", recursive=True)


def test_names_that_no_store_of_ours_would_take_are_listed_and_read(place):
    folder = open_folder(place)
    listing = folder.list()
    assert dict(listing.sizes) == {name: len(data) for name, data in NAMES.items()}
    assert not listing.is_file
    assert folder.read("sub/with space.bin", 3, 4) == b"3456"
    assert folder.read("sub/with space.bin", 8, 400) == b"89"
    assert folder.read("a", 0, 10) == b""


def test_one_file_is_a_folder_of_its_own(place):
    folder = open_folder(f"{place}/sub/with space.bin")
    listing = folder.list()
    assert (dict(listing.sizes), listing.is_file) == ({"with space.bin": 10}, True)
    assert folder.read("with space.bin", 0, 2) == b"01"


@pytest.mark.parametrize("name", ["../outside", "nothing", "sub", "/etc/passwd", "a\x00b"])
def test_what_is_not_listed_cannot_be_read(place, tmp_path, name):
    (tmp_path.parent / "outside").write_bytes(b"secret")
    folder = open_folder(place)
    folder.list()
    with pytest.raises(KeyNotFound):
        folder.read(name, 0, 10)


def test_nothing_is_an_error_that_says_so(tmp_path):
    with pytest.raises(KeyNotFound, match="nothing is at"):
        open_folder(str(tmp_path / "nowhere")).list()
    with pytest.raises(KeyNotFound, match="nothing is at"):
        open_folder("memory://nowhere").list()
    with pytest.raises(ConfigError, match="empty"):
        open_folder(" ")


def test_links_that_lead_out_pipes_and_folders_that_are_links_are_reported_and_not_read(tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    root = tmp_path / "root"
    (root / "real").mkdir(parents=True)
    (root / "real/x").write_bytes(b"inside")
    (root / "out").symlink_to(secret)
    (root / "out-folder").symlink_to(tmp_path)
    (root / "in").symlink_to("real/x")
    (root / "loop").symlink_to("loop")
    os.mkfifo(root / "pipe")
    folder = open_folder(str(root))
    listing = folder.list()
    assert dict(listing.sizes) == {"in": 6, "real/x": 6}
    assert set(listing.outside) == {"out", "out-folder", "loop", "pipe"}
    assert folder.read("in", 0, 6) == b"inside"
    for name in listing.outside:
        with pytest.raises(KeyNotFound):
            folder.read(name, 0, 6)


def test_a_folder_without_end_is_cut_short(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "FILES_MAX", 3)
    for number in range(9):
        (tmp_path / str(number)).touch()
    listing = open_folder(str(tmp_path)).list()
    assert (len(listing.sizes), listing.is_whole) == (3, False)
