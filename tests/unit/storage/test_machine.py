"""Memory that is left: the least of the machine and of every control group around us."""

from __future__ import annotations

import pytest

from resilient.errors import StoreFull
from resilient.storage import shared_memory
from resilient.storage.shared_memory import SharedFolder, available_memory_bytes


def group(root, name, limit, current, inactive):
    folder = root / "sys/fs/cgroup" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")


@pytest.fixture
def machine(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   1000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/job/task\n")
    return tmp_path


def test_without_groups_it_is_what_the_machine_has(machine):
    assert available_memory_bytes(machine) == 1000 << 10


def test_a_groups_page_cache_is_not_gone_for_good(machine):
    group(machine, "job/task", 5000, 4000, 700)
    assert available_memory_bytes(machine) == 1700


def test_the_narrowest_group_counts_and_an_unbounded_one_does_not(machine):
    group(machine, "job", 900, 100, 0)
    group(machine, "job/task", "max", 4000, 0)
    assert available_memory_bytes(machine) == 800


def test_where_nobody_tells_nothing_is_known(tmp_path):
    assert available_memory_bytes(tmp_path) is None


def test_shared_memory_that_the_host_does_not_have_is_refused_with_the_numbers(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        shared_memory, "available_memory_bytes", lambda: shared_memory.SPARE_BYTES + 1000
    )
    folder = SharedFolder(tmp_path)
    folder.allocate(1000)
    with pytest.raises(StoreFull, match="1001 bytes of shared memory are too many"):
        folder.allocate(1001)
    folder.close()
