"""How much memory this process may still take before the kernel kills somebody for it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_ROOT = Path("/")


def memory_left_bytes(root: Path = _ROOT) -> int | None:
    """Return the least of what the machine and this process's control groups have left.

    Shared memory counts against both, and its file system's size says nothing of either.

    Args:
        root: where ``proc`` and ``sys`` are.

    Returns:
        None where nobody tells.
    """
    found = [*_of_machine(root), *_of_groups(root)]
    return min(found, default=None)


def _of_machine(root: Path) -> list[int]:
    with suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return [int(value.split()[0]) << 10]
    return []


def _of_groups(root: Path) -> list[int]:
    """Return what each control group (version 2) around this process has left."""
    found: list[int] = []
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        names = [line.removeprefix("0::") for line in lines if line.startswith("0::")]
        top = root / "sys/fs/cgroup"
        for name in names:
            group = top / name.strip("/")
            found += [_left(one) for one in (group, *group.parents) if _is_bounded(one, top)]
    return found


def _is_bounded(group: Path, top: Path) -> bool:
    limit = group / "memory.max"
    return group.is_relative_to(top) and limit.exists() and limit.read_text().strip() != "max"


def _left(group: Path) -> int:
    limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
    # The page cache counts as used, and goes when somebody needs the memory.
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return limit - used + int(stat.get("inactive_file", 0))
