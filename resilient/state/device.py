"""Copies from CUDA devices: into page-locked memory, on a stream beside training's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from resilient.state.copying import changes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.state.copying import Copy

# cudaHostRegisterPortable: locked for every device of this process.
_PORTABLE = 1


class DeviceCopies:
    """Copies that one CUDA device makes by itself; begun when this is made.

    They come after all that training has asked of the device so far, and training may go on to
    read the sources. Before it changes them, it waits for ``make``.

    Args:
        copies: all from the same device.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = copies
        self._changes = [changes_of(one.source) for one in copies]
        device = copies[0].source.device
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it so
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for one in copies:
                one.target.copy_(one.source, non_blocking=True)
        self._event = stream.record_event()

    def make(self, *, modestly: bool = False) -> None:  # noqa: ARG002 - it takes no core
        """Wait for the device."""
        self._event.synchronize()

    def changed(self) -> list[str]:
        """Return the names of sources that were changed meanwhile."""
        counts = zip(self._copies, self._changes, strict=True)
        return [one.name for one, before in counts if changes_of(one.source) != before]


def lock_pages(memory: memoryview) -> int:
    """Lock memory in place, so that a device copies to it by itself, and return its address.

    Returns:
        0 if the driver refused; copies then hold up the thread that asks for them.
    """
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it so
    refused = int(runtime.cudaHostRegister(address, len(memory), _PORTABLE))
    return 0 if refused else address


def unlock_pages(address: int) -> None:
    """Take a lock back; the memory may go then."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it so
    runtime.cudaHostUnregister(address)
