"""How much memory of this process one save may take, where no keeper has its own bound."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from resilient.format.manifest import TensorEntry
    from resilient.format.shard import Lending


class Bound:
    """At most so many bytes at once: what is staged, or the files that are streamed.

    Args:
        bytes_max: None for no bound.

    Raises:
        ConfigError: it is no number of bytes.
    """

    def __init__(self, bytes_max: int | None = None) -> None:
        if bytes_max is not None and (type(bytes_max) is not int or bytes_max < 1):
            raise ConfigError(
                f"`host_bytes_max`={bytes_max!r} is no number of bytes",
                hint="none but to give a whole number, as host_bytes_max=2**30, or None",
            )
        self._bytes_max = bytes_max
        self._lent_bytes = 0
        self._changed = threading.Condition()

    def is_exceeded_by(self, sizes: Mapping[str, int]) -> bool:
        """Say whether files of these names and lengths do not fit together.

        Raises:
            ConfigError: one of them does not fit alone.
        """
        if self._bytes_max is None or sum(sizes.values()) <= self._bytes_max:
            return False
        largest = max(sizes, key=lambda name: sizes[name])
        if sizes[largest] > self._bytes_max:
            raise ConfigError(
                f"`{largest}` takes {sizes[largest]} bytes and `host_bytes_max` allows "
                f"{self._bytes_max}; nothing was saved, older checkpoints are intact",
                hint=f"none but to give host_bytes_max={sizes[largest]} or more",
            )
        return True

    def of(self, file: Lending) -> BoundedFile:
        """Return a file whose bytes are lent when there is room for them."""
        return BoundedFile(file, self)

    @contextmanager
    def taking(self, size_bytes: int) -> Iterator[None]:
        """Wait until so many bytes are left, and have them inside.

        Crash: memory is gone with the process.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_left(size_bytes))
            self._lent_bytes += size_bytes
        try:
            yield
        finally:
            with self._changed:
                self._lent_bytes -= size_bytes
                self._changed.notify_all()

    def _has_left(self, size_bytes: int) -> bool:
        return self._bytes_max is None or self._lent_bytes + size_bytes <= self._bytes_max


@dataclass(frozen=True, slots=True)
class BoundedFile:
    """A file that is streamed as far as a bound allows."""

    file: Lending
    bound: Bound

    @property
    def name(self) -> str:
        """File name inside the checkpoint's folder."""
        return self.file.name

    @property
    def size_bytes(self) -> int:
        """Its length."""
        return self.file.size_bytes

    @property
    def tensors(self) -> tuple[TensorEntry, ...]:
        """What it holds."""
        return self.file.tensors

    @contextmanager
    def lend(self) -> Iterator[bytes | memoryview]:
        """Yield the content once there is room for it."""
        with self.bound.taking(self.size_bytes), self.file.lend() as data:
            yield data
