"""Events: base class, levels, emitter, outputs (JSON lines, console) and append-only log file.

An event is the record of a fact, with typed fields. A log line is the text form of an event.

An event name consists of a noun and a past participle. The last word in the name of a numeric field
is its unit. An :class:`Emitter` knows ``run``, ``generation``, ``rank`` and ``step``, and adds them
to each event. Code that emits an event does not repeat them.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from resilient.clock import boot_name
from resilient.redaction import escape_control_chars, redact_json, redact_secrets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from resilient.clock import Clock
    from resilient.errors import ResilientError


class AppendOnlyLog:
    """Append-only text file whose writer never raises and drops lines that cannot be written.

    A full disk must not end a training that stores its checkpoints elsewhere or needs none. A
    message on standard error marks the first dropped line. Another message marks the end of the gap
    and has the number of dropped lines. Each line is one write in append mode, so several processes
    may share the file.

    Args:
        path: File to append to; its folder is created if possible.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._dropped_count = 0
        # Events come from the training thread and from the save thread.
        self._lock = threading.Lock()
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, line: str) -> None:
        """Write one line, or drop it if the file cannot be written."""
        with self._lock:
            try:
                _append(self._path, f"{line}\n".encode())
            except OSError as error:
                if self._dropped_count == 0:
                    is_special = error.errno in _SPECIAL_FILE_ERRORS
                    reason = error.strerror or type(error).__name__
                    remedy = f"remove it: rm {self._path}" if is_special else "free space: df -h"
                    write_stderr(
                        f"`{self._path}` cannot be written, and its lines are dropped: "
                        f"{'it is not a regular file' if is_special else reason}; "
                        f"training and checkpoints are not affected; {remedy}"
                    )
                self._dropped_count += 1
                return
            if self._dropped_count:
                write_stderr(
                    f"`{self._path}` is written again; lines dropped: {self._dropped_count}"
                )
                self._dropped_count = 0


_SPECIAL_FILE_ERRORS = frozenset({errno.ELOOP, errno.ENXIO, errno.EISDIR})
"""Errors for a link, for a pipe or socket, and for a folder in place of the file."""


def _append(path: Path, line: bytes) -> None:
    """Write the whole line or nothing, only to a regular file and never through a link."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
        written_bytes = os.write(descriptor, line)
        if written_bytes == len(line):
            return
        # A full disk may store only a part of the line. Remove this part, because it would damage
        # the next line. Keep the part if another process has already appended a line.
        end = os.lseek(descriptor, 0, os.SEEK_CUR)
        if os.fstat(descriptor).st_size == end:
            os.ftruncate(descriptor, end - written_bytes)
    finally:
        os.close(descriptor)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_stderr(text: str) -> None:
    """Write one line to standard error; ignore failures."""
    # The program may have closed standard error, or have none.
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"resilient: {escape_control_chars(redact_secrets(text))}\n")


def say_error(error: ResilientError) -> None:
    """Write the error that ended the process to standard error; ignore failures."""
    hint = f"\n  hint: {error.hint}" if error.hint else ""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(
            escape_control_chars(redact_secrets(f"{error.message}  [{error.code}]{hint}\n"))
        )


class Level(IntEnum):
    """Severity of an event, with the numbers of the standard library's logging."""

    DEBUG = 10
    INFO = 20
    WARNING = 30
    ERROR = 40


@dataclass(frozen=True, slots=True)
class Event:
    """Base class of events. Subclasses add fields, and their own template or ``message()``.

    Attributes:
        level: Severity of the event.
        template: Message for people, a format string over the fields. Without one, the message
            lists the name of the class and all fields.
    """

    level: ClassVar[Level] = Level.INFO
    template: ClassVar[str] = ""

    def fields(self) -> dict[str, Any]:
        """Return the fields by name, as JSON-able values."""
        return asdict(self)

    def message(self) -> str:
        """Return the event as one line for people, without time, rank or step."""
        fields = self.fields()
        if self.template:
            return self.template.format(**fields)
        text = " ".join(f"{name}={value}" for name, value in fields.items())
        return f"{type(self).__name__} {text}".rstrip()


@dataclass(frozen=True, slots=True)
class GenerationClaimed(Event):
    """An attempt of the run claimed its generation."""

    generation: int
    parent: str
    cause: str

    def message(self) -> str:
        """Render the event as one line for people."""
        return f"generation {self.generation} from {self.parent or 'scratch'} ({self.cause})"


@dataclass(frozen=True, slots=True)
class CheckpointSkipped(Event):
    """Resume skipped a checkpoint."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = "skipped {checkpoint}: {reason}"
    checkpoint: str
    reason: str


@dataclass(frozen=True, slots=True)
class RunRestartedFromScratch(Event):
    """An attempt began from scratch although committed checkpoints are present."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = (
        "started over: {left} committed checkpoints are kept but not used; to continue from them: "
        "--resume {newest}"
    )
    left: int
    newest: str


@dataclass(frozen=True, slots=True)
class ResumeSettled(Event):
    """The resume policy chose a reference that differs from the user's request.

    Attributes:
        wish: Value of ``--resume``, or what the script asked for.
        reference: Reference that the attempt begins from.
        reason: Reason for the choice.
    """

    level: ClassVar[Level] = Level.WARNING
    wish: str
    reference: str
    reason: str

    def message(self) -> str:
        """Render the event as one line for people."""
        checkpoint_text = "the newest checkpoint" if self.reference == "auto" else self.reference
        return (
            f"`--resume {self.wish}` is fulfilled: {self.reason}, so this attempt continues from "
            f"{checkpoint_text}"
        )


@dataclass(frozen=True, slots=True)
class CheckpointRestored(Event):
    """All ranks verified and loaded the same checkpoint."""

    template: ClassVar[str] = (
        "resumed from {checkpoint} (step {step}), verified in {took_seconds:.2f} s"
    )
    checkpoint: str
    step: int
    size_bytes: int
    took_seconds: float


@dataclass(frozen=True, slots=True)
class CheckpointCommitted(Event):
    """The manifest is in the store, so the checkpoint exists."""

    checkpoint: str
    size_bytes: int
    stall_seconds: float
    commit_seconds: float
    written_bytes: int = -1

    def message(self) -> str:
        """Render the event as one line for people."""
        has_reused_bytes = 0 <= self.written_bytes < self.size_bytes
        written_text = (
            f" ({self.written_bytes / 2**20:.1f} MiB written)" if has_reused_bytes else ""
        )
        return (
            f"saved {self.checkpoint}, {self.size_bytes / 2**20:.1f} MiB{written_text} durable in "
            f"{self.commit_seconds:.2f} s, training waited {self.stall_seconds:.3f} s"
        )


@dataclass(frozen=True, slots=True)
class SaveAborted(Event):
    """A checkpoint was not committed; older ones are untouched."""

    level: ClassVar[Level] = Level.ERROR
    checkpoint: str
    reason: str
    hint: str

    def message(self) -> str:
        """Render the event as one line for people."""
        return f"{self.checkpoint} was not saved: {self.reason}; older checkpoints are intact" + (
            f"; {self.hint}" if self.hint else ""
        )


@dataclass(frozen=True, slots=True)
class CheckpointDeleted(Event):
    """Retention deleted a checkpoint."""

    level: ClassVar[Level] = Level.DEBUG
    checkpoint: str


@dataclass(frozen=True, slots=True)
class UploadsAborted(Event):
    """Unfinished uploads of older attempts were aborted."""

    level: ClassVar[Level] = Level.DEBUG
    count: int


@dataclass(frozen=True, slots=True)
class UploadCleanupFailed(Event):
    """Unfinished uploads of older attempts, if any, could not be aborted."""

    level: ClassVar[Level] = Level.DEBUG
    reason: str
    hint: str


@dataclass(frozen=True, slots=True)
class RetentionFailed(Event):
    """An old checkpoint could not be deleted; the new one stays committed."""

    level: ClassVar[Level] = Level.WARNING
    checkpoint: str
    reason: str


@dataclass(frozen=True, slots=True)
class RetentionPlanned(Event):
    """Retention decided which checkpoints stay after a commit, with all reasons for each."""

    level: ClassVar[Level] = Level.DEBUG
    checkpoint: str
    kept: Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class RetentionDeferred(Event):
    """Old checkpoints were not deleted, because that might not be safe now."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = "kept old checkpoints after {checkpoint}: {reason}; nothing is lost"
    checkpoint: str
    reason: str


@dataclass(frozen=True, slots=True)
class BestCheckpointDamaged(Event):
    """A checkpoint that would rank among the best is damaged, so it does not count."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = (
        "{checkpoint} {reason}; it is kept, and the next best is used: resilient ckpt verify "
        "{checkpoint}"
    )
    checkpoint: str
    reason: str


@dataclass(frozen=True, slots=True)
class Emitter:
    """Sender of events to sinks, with the context of this process bound once.

    A sink that raises an ``Exception`` affects neither the other sinks nor the caller, and still
    receives the next event. The first error of each sink is reported on standard error. Other
    exceptions, such as KeyboardInterrupt, pass through.

    Args:
        clock: Source of the time of each event: time of day, and the monotonic time, which cannot
            be set. The name of the machine's boot is recorded with it.
        sinks: Callbacks, called in order with the record (a JSON-able mapping) and the event.
        context: ``run``, ``generation``, ``rank``, ``step`` as far as they are known.
    """

    clock: Clock
    sinks: tuple[Callable[[Mapping[str, Any], Event], None], ...] = ()
    context: Mapping[str, Any] = field(default_factory=dict)
    _failures: set[int] = field(default_factory=set, repr=False, compare=False)

    def __call__(self, event: Event, **context: Any) -> None:
        """Send one event; ``context`` applies to this event only."""
        record = {
            "at": self.clock.now_iso(),
            "monotonic": round(self.clock.monotonic_seconds(), 3),
            "boot": boot_name(),
            **self.context,
            **context,
            "event": type(event).__name__,
            **event.fields(),
        }
        for sink in self.sinks:
            try:
                sink(record, event)
            except Exception as error:  # noqa: BLE001 - a sink must not undo what happened
                self._report_sink_error(sink, error)

    def bind(self, **context: Any) -> Emitter:
        """Return an emitter that adds ``context`` to every event."""
        return replace(self, context={**self.context, **context})

    def _report_sink_error(self, sink: object, error: Exception) -> None:
        """Report the first error of each sink, also across emitters bound from this one."""
        if id(sink) in self._failures:
            return
        self._failures.add(id(sink))
        name = getattr(sink, "__qualname__", type(sink).__qualname__)
        write_stderr(
            f"the event sink `{name}` raised {type(error).__name__}: {error}; it still gets later "
            "events, and this error is reported once; training and checkpoints are not affected"
        )


def json_lines(path: Path) -> Callable[[Mapping[str, Any], Event], None]:
    """Return a sink that appends one JSON object per event to ``path``."""
    file = AppendOnlyLog(path)

    def sink(record: Mapping[str, Any], _event: Event) -> None:
        file.append(json.dumps(redact_json(record)))

    return sink


def console(
    threshold: int = Level.INFO, stream: TextIO | None = None
) -> Callable[[Mapping[str, Any], Event], None]:
    """Return a sink that writes one line per event of at least ``threshold`` to stderr."""

    def sink(record: Mapping[str, Any], event: Event) -> None:
        if event.level < threshold:
            return
        clock_time = str(record["at"])[11:19]
        rank = f"r{record['rank']:03d}  " if "rank" in record else ""
        # Standard error may be a file on a full disk.
        with suppress(OSError):
            line = escape_control_chars(redact_secrets(event.message()))
            (stream or sys.stderr).write(f"{clock_time}  {rank}{line}\n")

    return sink
