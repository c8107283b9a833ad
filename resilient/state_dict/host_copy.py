"""Copies of tensors into host memory, made at once or later, during training.

Copies from CUDA devices go into page-locked memory, on a separate stream.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from itertools import starmap
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from resilient.distributed.coordination import RankFailure, capture_failure
from resilient.errors import SaveFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

# torch's documentation of autograd describes the counter.
_version = attrgetter("_version")


@dataclass(frozen=True, slots=True, eq=False)
class TensorCopy:
    """One box to copy.

    Attributes:
        name: Name of the tensor, for messages.
        source: Elements of the box, on any device, with any strides; shares memory with training.
        target: Host memory of a file as a tensor like the source; see ``target_in``.
    """

    name: str
    source: torch.Tensor
    target: torch.Tensor


class HostCopyBatch:
    """Batch of copies within host memory; ``renew`` prepares the batch for the next save.

    Args:
        copies: Copies to make. A change of a source after construction is detected.
    """

    def __init__(self, copies: Sequence[TensorCopy]) -> None:
        self._names = [copy.name for copy in copies]
        self._sources = [copy.source for copy in copies]
        self._targets = [copy.target for copy in copies]
        are_counted = not any(map(torch.Tensor.is_inference, self._sources))
        self._count = _version if are_counted else changes_of
        self._addresses: list[int] = []
        self._bytes: list[Any] | None = None
        self.renew()

    def renew(self) -> None:
        """Reset the batch, so that only later changes of the sources count."""
        self._changes = [*map(self._count, self._sources)]
        addresses = [*map(torch.Tensor.data_ptr, self._sources)]
        if addresses != self._addresses:
            # A storage may have got other memory.
            self._bytes, self._addresses = None, addresses

    def make(self, *, modestly: bool = False) -> None:
        """Make the copies, with torch's number of threads or only with this thread.

        Args:
            modestly: Use only this thread, so that training keeps the other cores.
        """
        if not modestly:
            copy_all(self._sources, self._targets)
            return
        if self._bytes is None:
            self._bytes = [*map(_bytes_of, self._targets, self._sources)]
        if all(self._bytes):
            # A byte copy is one memcpy that releases the interpreter lock.
            deque(starmap(np.copyto, self._bytes), maxlen=0)
            return
        for pair, source, target in zip(self._bytes, self._sources, self._targets, strict=True):
            if pair:
                np.copyto(*pair)
            elif source.numel():
                target.copy_(source)

    def changed(self) -> list[str]:
        """Return the names of the tensors that were changed in place since the last reset."""
        changes = [*map(self._count, self._sources)]
        if changes == self._changes:
            return []
        counts = zip(self._names, self._changes, changes, strict=True)
        return [name for name, count_before, count_now in counts if count_now != count_before]


def _bytes_of(target: torch.Tensor, source: torch.Tensor) -> tuple[Any, ...]:
    """Return the bytes of target and source if a byte copy suffices, else an empty tuple."""
    if not source.numel() or source.device.type != "cpu" or not source.is_contiguous():
        return ()
    if source.is_conj() or source.is_neg():
        return ()
    return tuple(tensor.reshape(-1).view(torch.uint8).numpy() for tensor in (target, source))


def target_in(buffer: memoryview, start: int, like: torch.Tensor) -> torch.Tensor:
    """Return a part of host memory as a row-major tensor.

    Args:
        buffer: Memory of a file.
        start: Offset in the memory, in bytes.
        like: Tensor with the dtype and the shape.
    """
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype)
    flat = torch.frombuffer(buffer, dtype=like.dtype, count=like.numel(), offset=start)
    return flat.view(like.shape)


def copy_all(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copy many small tensors in one call, which is cheaper than one call for each.

    Args:
        sources: Tensors on any device, with any strides.
        targets: Host memory, one target per source.
    """
    if sources and all(tensor.is_cpu for tensor in sources):
        torch._foreach_copy_(list(targets), list(sources))
        return
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


class PendingCopy(Protocol):
    """A piece of work that fills host memory."""

    def make(self, *, modestly: bool = False) -> None:
        """Return once the bytes are copied."""

    def changed(self) -> list[str]:
        """Return the names of tensors that were changed meanwhile."""


class DeferredCopies:
    """Copies of memory that training does not change for a while, made in the background.

    A background thread makes the copies one by one. When the training thread needs the copies, it
    makes the remaining ones and waits for the copy in progress.

    A copy is invalid if its source changed meanwhile. torch counts in-place changes, and
    ``require_unchanged`` checks the counters. The counters do not include a change through
    ``.data`` or a change in progress. Therefore the code that changes the sources must call
    ``require_unchanged`` directly before the change.

    Args:
        work: Copies that are not started, or that a device makes asynchronously.
    """

    def __init__(self, work: Sequence[PendingCopy] = ()) -> None:
        self._work = [*work]
        self._pending = deque(work)
        self._missing = len(work)
        self._lock = threading.Lock()
        self._whole = threading.Event()
        self._failures: list[RankFailure] = []
        if not work:
            self._whole.set()

    def __len__(self) -> int:
        return self._missing

    def make(self, *, modestly: bool = False) -> None:
        """Make the copies that no thread has started, and wait for all others.

        An error of a copy is kept for ``require_unchanged``.

        Args:
            modestly: Leave the other cores to training.
        """
        while self._make_next(modestly=modestly):
            continue
        self._whole.wait()

    def forget(self) -> None:
        """Release the sources, which training may replace. Do not check afterwards."""
        self._work = []

    def require_unchanged(self) -> None:
        """Raise if a source changed before its copy was complete, or if a copy failed.

        Raises:
            SaveFailed: A source was changed meanwhile.
            ResilientError: A copy could not be made.
        """
        if self._failures:
            raise self._failures[0].to_error(1) from self._failures[0].cause
        changed_names = [name for batch in self._work for name in batch.changed()]
        if changed_names:
            raise SaveFailed(
                f"`{changed_names[0]}` and {len(changed_names) - 1} others changed during the "
                "copy: with overlap, parameters must not change between a save and the next "
                "optimizer.step()",
                hint="change parameters after optimizer.step() (after before_update() if you wait "
                "for the copy yourself), or save without overlap (resilient.Checkpointer: "
                "overlap=False, TrainingArguments: save_overlap=False)",
            )

    def _make_next(self, *, modestly: bool) -> bool:
        """Make one copy; return False if all copies have started."""
        try:
            batch = self._pending.popleft()
        except IndexError:
            return False
        result = capture_failure(lambda: batch.make(modestly=modestly))
        with self._lock:
            if isinstance(result, RankFailure):
                self._failures.append(result)
            self._missing -= 1
            if not self._missing:
                self._whole.set()
        return True


def changes_of(tensor: torch.Tensor) -> int:
    """Return torch's counter of in-place changes of a tensor; views share one counter."""
    # Tensors of inference mode have no counter.
    return 0 if tensor.is_inference() else int(_version(tensor))


# cudaHostRegisterPortable: locked for every device of this process.
_PORTABLE = 1


class DeviceCopies:
    """Copies that one CUDA device makes asynchronously from the construction on.

    The copies run after all work that training has already queued on the device. Training may
    continue to read the sources. Before it changes the sources, training waits for ``make``.

    Args:
        copies: Copies from the same device.
    """

    def __init__(self, copies: Sequence[TensorCopy]) -> None:
        self._copies = copies
        self._changes = [changes_of(copy.source) for copy in copies]
        device = copies[0].source.device
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it so
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for copy in copies:
                copy.target.copy_(copy.source, non_blocking=True)
        self._event = stream.record_event()

    def make(self, *, modestly: bool = False) -> None:  # noqa: ARG002 - it takes no core
        """Wait for the device."""
        self._event.synchronize()

    def changed(self) -> list[str]:
        """Return the names of sources that were changed meanwhile."""
        counts = zip(self._copies, self._changes, strict=True)
        return [
            copy.name for copy, count_before in counts if changes_of(copy.source) != count_before
        ]


def lock_pages(memory: memoryview) -> int:
    """Page-lock memory, so that a device can copy to it asynchronously; return the address.

    Returns:
        0 if the driver refused; copies then block the thread that requests them.
    """
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it so
    refused = int(runtime.cudaHostRegister(address, len(memory), _PORTABLE))
    return 0 if refused else address


def unlock_pages(address: int) -> None:
    """Unlock memory, which may be freed afterwards."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it so
    runtime.cudaHostUnregister(address)
