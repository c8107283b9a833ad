"""Text to stdout and stderr, all of it through :func:`put`: a terminal obeys nothing of it.

What others wrote (names, messages, lines of servers) may hold escapes, bells, carriage returns and
letters that turn the direction of those around them. They are spelled; newlines are meant, and so
are the colours that :mod:`resilient_cli.render` puts in.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from contextlib import contextmanager
from io import TextIOWrapper
from typing import TYPE_CHECKING, TextIO

from resilient.showing import visible, without_secrets
from resilient.storage.errnos import kind_of

if TYPE_CHECKING:
    from collections.abc import Iterator

_COLOR = re.compile(r"(\x1b\[(?:\d{1,2};?){1,2}m)")


def put(text: str, stream: TextIO, *, is_painted: bool = False) -> None:
    """Write a text to stdout or stderr; the one way for text that does not end as JSON of others.

    Args:
        text: with the newlines that are meant.
        stream: where to.
        is_painted: whether the colours of this module may be in it, and are meant.
    """
    parts = _COLOR.split(text) if is_painted else [text]
    stream.write("".join(one if nth % 2 else visible(one) for nth, one in enumerate(parts)))


def say(line: str) -> None:
    """Write a line about the work to stderr, without the secrets of URLs."""
    put(f"{without_secrets(line)}\n", sys.stderr)
    sys.stderr.flush()


def redraw(line: str, stream: TextIO) -> None:
    """Write over the line that a terminal shows."""
    stream.write("\r" + visible(line, ""))
    stream.flush()


def clear_screen() -> None:
    """Let what is shown next begin at the top of the terminal."""
    sys.stdout.write("\x1b[H\x1b[2J")


@contextmanager
def answering() -> Iterator[None]:
    """Say of a stdout that takes no more what it is: a full disk, mostly.

    Raises:
        StoreError: of the kind that the system's error is; a pipe that nobody reads is none.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        leave_the_pipe()  # what is left in the buffer would fail again at the end
        raise kind_of(error)(
            f"the answer could not be written to stdout, and is cut short: {error.strerror}",
            hint="df -h",
        ) from error


def leave_the_pipe() -> None:
    """Write to nowhere from here on: whoever read has enough, and what was done stays done."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def write_nowhere_if_closed() -> None:
    """Give a process that was started without stdout or stderr (``>&-``) one that takes all."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115


def speak_plainly(*streams: TextIO) -> None:
    """Let streams write what their encoding has not as escapes: a name must not end a command."""
    for stream in streams:
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def columns_of(stream: TextIO) -> int:
    """Return how many columns a terminal has; 0 for what is none, where lines may be long."""
    return shutil.get_terminal_size().columns if stream.isatty() else 0
