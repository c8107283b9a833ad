"""How much memory a keeper is granted: what was asked for against what there is."""

from __future__ import annotations

import pytest

from resilient.elastic import saver_daemon
from resilient.elastic.options import DaemonOptions
from resilient.elastic.saver_daemon import (
    AUTO,
    NONE,
    DaemonSupervisor,
    parse_host_bytes,
    resolve_memory_limit,
)
from resilient.errors import ConfigError

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("auto", AUTO),
        ("0", AUTO),
        ("none", NONE),
        ("-1", NONE),
        ("1000", 1000),
        ("8GiB", 8 << 30),
        (" 8 gib ", 8 << 30),
        ("8Gi", 8 << 30),
        ("1.5MiB", 3 << 19),
        ("2GB", 2_000_000_000),
        ("64kB", 64_000),
    ],
)
def test_a_size_is_read_with_its_unit(text, size_bytes):
    assert parse_host_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "8G", "much", "-8GiB", "8 giga", "1e9", "0GiB", "nan"])
def test_what_is_no_size_is_refused_by_its_name(text):
    with pytest.raises(ConfigError, match="--host-bytes-max"):
        parse_host_bytes(text)


@pytest.fixture
def host(monkeypatch, tmp_path):
    """Say what the host has: bytes of shared memory, and of memory left."""

    def has(shared_bytes, left_bytes):
        monkeypatch.setattr(saver_daemon, "free_bytes", lambda root: shared_bytes)
        monkeypatch.setattr(saver_daemon, "available_memory_bytes", lambda: left_bytes)
        return lambda size_bytes: resolve_memory_limit(DaemonOptions(size_bytes), tmp_path)

    return has


@pytest.mark.parametrize(
    ("shared_bytes", "left_bytes", "granted_bytes"),
    [
        (100 * MIB, 1000 * MIB, 100 * MIB),
        (1000 * MIB, 100 * MIB, 50 * MIB),
        (100 * MIB, None, 100 * MIB),
    ],
)
def test_by_default_a_keeper_gets_what_is_free_and_half_the_memory_at_most(
    host, shared_bytes, left_bytes, granted_bytes
):
    granted = host(shared_bytes, left_bytes)(AUTO)
    assert (granted.host_bytes_max, granted.is_auto) == (granted_bytes, True)


@pytest.mark.parametrize(("shared_bytes", "left_bytes"), [(MIB, 1000 * MIB), (1000 * MIB, 9 * MIB)])
def test_a_machine_that_is_too_small_has_no_keeper_by_default_and_says_why(
    host, shared_bytes, left_bytes
):
    granted = host(shared_bytes, left_bytes)(AUTO)
    assert granted.host_bytes_max == NONE
    assert f"has {shared_bytes} bytes free and the machine {left_bytes}" in granted.why_not


@pytest.mark.parametrize(("shared_bytes", "left_bytes"), [(MIB, 1000 * MIB), (1000 * MIB, MIB)])
def test_a_size_that_the_host_has_not_is_refused_with_the_numbers(host, shared_bytes, left_bytes):
    with pytest.raises(ConfigError, match=f"{2 * MIB} bytes are too many: .* {shared_bytes} bytes"):
        host(shared_bytes, left_bytes)(2 * MIB)


def test_a_size_that_the_host_has_is_granted_as_it_is(host):
    granted = host(1000 * MIB, 1000 * MIB)(900 * MIB)
    assert (granted.host_bytes_max, granted.is_auto) == (900 * MIB, False)


def test_a_host_without_shared_memory_has_no_keeper_unless_one_was_asked_for(tmp_path):
    missing = tmp_path / "missing"
    assert f"{missing} does not exist" in resolve_memory_limit(DaemonOptions(AUTO), missing).why_not
    with pytest.raises(ConfigError, match=f"{missing} does not exist"):
        resolve_memory_limit(DaemonOptions(1000), missing)
    assert resolve_memory_limit(DaemonOptions(NONE), missing) == DaemonOptions(NONE)


def test_that_there_is_no_keeper_is_told_once_if_one_was_wanted(tmp_path):
    said = []
    wishes = DaemonOptions(NONE, why_not="there is no room")
    keeping = DaemonSupervisor(tmp_path, wishes, 1.0, lambda event: said.append(event.message()))
    for _ in range(2):
        keeping.start()
        keeping.ready()
    keeping.stop()
    assert keeping.path == ""
    assert len(said) == 1
    assert said[0].endswith("the trainers save by themselves: there is no room")
    DaemonSupervisor(tmp_path, DaemonOptions(NONE), 1.0, said.append)
    assert len(said) == 1
