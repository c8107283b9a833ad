"""What outlives a save: host buffers, for fresh pages cost several times the copy, and plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.state.drafts import Drafts
from resilient.state.haste import Splits
from resilient.storage.memory import PrivateBuffers, touch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from resilient.format.shard import Layout
    from resilient.state.drafts import Draft


class Arena:
    """Host buffers by the name of the file that is staged there.

    Args:
        allocate: gives at least so many bytes for a file of this name, the same as last time
            where it can; private memory by default.
        streams: says whether there is no room for files of these names and lengths; never, by
            default.

    Attributes:
        drafts: how the files that are staged here were laid out last.
        splits: how they were split into what waits and what does not.
    """

    def __init__(
        self,
        allocate: Callable[[str, int], memoryview] | None = None,
        streams: Callable[[Mapping[str, int]], bool] | None = None,
    ) -> None:
        self._streams = streams or (lambda _: False)
        self._allocate = allocate or PrivateBuffers().get
        self._buffers: dict[str, memoryview] = {}
        self._locked: dict[str, int] = {}
        self._targets: dict[str, tuple[Layout, tuple[torch.Tensor, ...]]] = {}
        self.drafts = Drafts()
        self.splits = Splits()

    def has_room(self, sizes: Mapping[str, int]) -> bool:
        """Say whether files of these names and lengths can be staged; let go of all others.

        Raises:
            ConfigError: there is not even room to stream them.
        """
        streams = self._streams(sizes)
        for name in [one for one in self._buffers if streams or one not in sizes]:
            self._forget(name)
            del self._buffers[name]
        return not streams

    def buffer(self, name: str, size_bytes: int) -> memoryview:
        """Return ``size_bytes`` of memory for a file."""
        given = self._allocate(name, size_bytes)
        held = self._buffers.get(name)
        if held is None or held.obj is not given.obj:
            self._forget(name)
            self._buffers[name] = memoryview(given.obj)
        return given[:size_bytes]

    def targets(self, file: Draft, buffer: memoryview) -> tuple[torch.Tensor, ...]:
        """Return where the sources of a file go in its memory, and write its header there.

        Args:
            file: what is staged.
            buffer: what ``buffer`` gave for it.
        """
        buffer[: len(file.layout.head)] = file.layout.head
        layout, targets = self._targets.get(file.name, (None, ()))
        if layout is not file.layout:
            targets = file.targets(buffer)
            self._targets[file.name] = (file.layout, targets)
        return targets

    def warm(self, sizes: Mapping[str, int]) -> None:
        """Get the memory for files of these names and lengths, and touch every page of it."""
        if not self.has_room(sizes):
            return
        for name, size_bytes in sizes.items():
            if name not in self._buffers:
                self.buffer(name, size_bytes)
                touch(self._buffers[name])

    def lock(self, name: str) -> None:
        """Lock a file's memory for copies by a CUDA device; it stays locked while it is here."""
        # Only a process with a GPU pays for this.
        from resilient.state.device import lock_pages

        if name not in self._locked:
            self._locked[name] = lock_pages(self._buffers[name])

    def close(self) -> None:
        """Let go of all memory; nothing is in use."""
        for name in list(self._buffers):
            self._forget(name)
        self._buffers.clear()

    def _forget(self, name: str) -> None:
        """Keep nothing that points into the memory of a file."""
        self._targets.pop(name, None)
        self.splits.forget(name)
        self._unlock(name)

    def _unlock(self, name: str) -> None:
        address = self._locked.pop(name, 0)
        if address:
            from resilient.state.device import unlock_pages

            unlock_pages(address)
