"""Lock files that hung ranks wait for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from resilient.elastic.stack_dump import main_stack
from resilient.elastic.workers.build_locks import describe_process, find_locks, held_files, users_of
from resilient.redaction import shell_quote

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from resilient.elastic.stack_dump import RankStacks

_BUILD_WAIT = re.compile(r'File "[^"]*torch/utils/file_baton\.py", line \d+ in wait')
_FILE_LOCK = re.compile(r'File "[^"]*/filelock/[^"]*\.py", line \d+ in ')
_SUFFIX = ".lock"
_LOCKS_MAX = 4


def awaited_locks(stacks: Iterable[RankStacks], environ: Mapping[str, str]) -> list[str]:
    """Return a line for each lock file that a rank may wait for.

    The stacks show the kind of lock but no path. So the lines name the build locks of torch's
    extension cache, or the files that a process of this host holds by ``flock``.

    Args:
        stacks: Stacks of the ranks of this host.
        environ: Environment of the ranks, which names the cache.
    """
    lines = []
    mains = {stack.rank: "\n".join(main_stack(stack.stacks)) for stack in stacks}
    if ranks := [rank for rank, text in mains.items() if _BUILD_WAIT.search(text)]:
        lines += _build_locks(ranks, find_locks(environ))
    if ranks := [rank for rank, text in mains.items() if _FILE_LOCK.search(text)]:
        lines += _file_locks(ranks, held_files(_SUFFIX))
    return lines


def _build_locks(ranks: list[int], found: list[Path]) -> list[str]:
    who = _name(ranks)
    if not found:
        where = "a folder outside torch's extension cache (`build_directory`)"
        return [f"{who} for a build lock of torch, the file `lock` in {where}"]
    return [f"{who} for the build lock {lock}: {_owner(lock)}" for lock in found[:_LOCKS_MAX]]


def _owner(lock: Path) -> str:
    holders = users_of(lock).holders
    if holders:
        return f"{describe_process(holders[0])} has the lock open"
    command = f"rm {shell_quote(str(lock))}"
    return f"no process of this host has the lock open; if no other host builds: {command}"


def _file_locks(ranks: list[int], owners: Mapping[str, int]) -> list[str]:
    who = _name(ranks)
    if not owners:
        return [f"{who} for a file lock that no process of this host holds"]
    rows = sorted(owners.items())[:_LOCKS_MAX]
    return [f"{who} for a file lock; {describe_process(pid)} holds {path}" for path, pid in rows]


def _name(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} waits"
    return f"ranks {', '.join(map(str, ranks))} wait"
