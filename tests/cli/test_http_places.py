"""A file behind a web server: read as it is, or an error with its exit code and what to do next."""

from __future__ import annotations

import re
import socket

import pytest
import torch

from resilient.errors import ConfigError
from resilient.storage import folder as folder_module
from resilient.storage.folder import open_folder
from resilient.storage.fsspec_store import FsspecStore
from tests.helpers.http_places import serve_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("served")
    (found / "run").mkdir()
    generator = torch.Generator().manual_seed(0)
    torch.save({"w": torch.randn(300_000, generator=generator)}, found / "w.pt")
    return found


@pytest.fixture(scope="module")
def url(folder):
    with serve_folder(folder) as found:
        yield found


@pytest.mark.parametrize("how", ["ranged", "whole", "moved"])
def test_a_file_is_read_whether_its_server_sends_parts_or_not(how, folder, url, call):
    far, near = f"{url}/{how}/w.pt", folder / "w.pt"
    for words in (("inspect",), ("verify",), ("scan",)):
        outcome, other = call("ckpt", *words, far), call("ckpt", *words, near)
        assert outcome.status == other.status
        # Nothing of it is called damaged.
        assert "a zip" not in outcome.stdout
    assert call("ckpt", "diff", far, near, "--exit-code").status == 0
    outcome = call("ckpt", "cat", far, "model/w")
    assert outcome.status == 0
    assert "300000 of F32" in outcome.stdout


REFUSALS = {
    "missing/w.pt": (66, "RES-REPO-404", "no "),
    "ranged/other.pt": (66, "RES-REPO-404", "no "),
    "forbidden/w.pt": (77, "RES-STORE-403", "403"),
    "unasked/w.pt": (77, "RES-STORE-403", "401"),
    "broken/w.pt": (69, "RES-STORE-503", "500"),
    "busy/w.pt": (69, "RES-STORE-503", "503"),
    "around/w.pt": (69, "RES-STORE", "TooManyRedirects"),
    "chunked/w.pt": (78, "RES-CONFIG", "does not report the size"),
    "ranged/run": (65, "RES-CKPT-LAYOUT", "over http a folder cannot be listed"),
    "ranged/run/": (65, "RES-CKPT-LAYOUT", "over http a folder cannot be listed"),
    "bare/run/": (77, "RES-STORE-403", "403"),
}


@pytest.mark.parametrize("place", REFUSALS)
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_what_cannot_be_read_has_its_exit_code(command, place, url, call):
    status, code, said = REFUSALS[place]
    outcome = call("ckpt", command, f"{url}/{place}", "--timeout", "1s")
    assert outcome.status == status
    assert f"[{code}]" in outcome.stderr
    assert said in outcome.stderr
    assert "unexpected" not in outcome.stderr
    assert re.search(r"^  hint: (resilient|curl) ", outcome.stderr, re.MULTILINE)
    assert outcome.stdout == ""


def test_nobody_there_is_said_so(call):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/w.pt"
        outcome = call("ckpt", "inspect", url, "--timeout", "1s")
    assert outcome.status == 69
    assert "[RES-STORE-503]" in outcome.stderr
    assert "hint: curl " in outcome.stderr


def test_a_file_too_large_to_be_held_is_not_fetched_for_a_part_of_it(url, monkeypatch):
    monkeypatch.setattr(folder_module, "_WHOLE_BYTES_MAX", 1000)
    found = open_folder(f"{url}/whole/w.pt")
    found.list()
    with pytest.raises(ConfigError, match="sends no byte ranges") as caught:
        found.read("w.pt", 0, 10)
    assert caught.value.hint.startswith("curl -LO http://")
    ranged = open_folder(f"{url}/ranged/w.pt")
    ranged.list()
    assert len(ranged.read("w.pt", 5, 10)) == 10


def test_a_store_takes_a_part_of_what_a_server_sends_whole(folder, url):
    data = (folder / "w.pt").read_bytes()
    for how in ("whole", "ranged"):
        store = FsspecStore(f"{url}/{how}")
        assert store.get_range("w.pt", 7, 9) == data[7:16]
