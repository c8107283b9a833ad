"""A small run whose file operations are recorded: ``python tests/crash/recorded.py FOLDER``.

It prints the record, one operation per line, for somebody else to hold against what the kernel
was really asked.
"""

from __future__ import annotations

import sys
from pathlib import Path

from resilient.checkpoint.retention import Retention
from resilient.storage.local import LocalStore
from resilient.storage.posix import PosixFileSystem
from resilient.testing.disk_model import FileOp, FileOpKind, FileOpLog, RecordingFileSystem
from tests.crash.histories import PLACE
from tests.crash.little import Life, Setup, TickingClock


def spelled(steps: list[FileOp]) -> list[str]:
    """Return operations as lines; of a file, with the path that it was created under."""
    created, lines = {}, []
    for op in steps:
        if op.act is FileOpKind.CREATE:
            created[op.file] = op.path
        path = "/".join(op.path or created.get(op.file, ()))
        lines.append(" ".join([op.act.value, path, *_more(op)]))
    return lines


def _more(op: FileOp) -> list[str]:
    if op.act is FileOpKind.WRITE:
        return [str(len(op.data))]
    return ["/".join(op.target)] if op.target else []


def main(folder: Path) -> None:
    record = FileOpLog()
    files = RecordingFileSystem(PosixFileSystem(), folder, record)
    store = LocalStore(folder.joinpath(*PLACE), files)
    life = Life(store, Setup(Retention(keep_last=1)), TickingClock())
    life.begin()
    for _ in range(3):
        life.save()
    life.tag("mine", life.life.parent or next(iter(_committed(store))))
    life.untag("mine")
    sys.stdout.write("\n".join(spelled(record.steps)) + "\n")


def _committed(store):
    from resilient.checkpoint.catalog import committed

    return committed(store)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
