"""Shutdown of a loader's worker processes at a defined time, not by the garbage collector.

The garbage collector may finalize the index queues of a loader before the loader's iterator.
Workers receive the request to exit through these queues. Without the request, torch waits 5 s for
each worker, one after the other.
"""

from __future__ import annotations

import os
import weakref
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from torch.utils.data import _utils as torch_utils
from torch.utils.data import dataloader as torch_loader

from resilient.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_Iterator = torch_loader._MultiProcessingDataLoaderIter  # noqa: SLF001 - no public name
_END_TIMEOUT_SECONDS = 2.0
"""Deadline for all workers of one iterator together; a worker inside a slow sample is killed."""


def end_workers(iterator: object) -> None:
    """End the worker processes of a loader's iterator, which yields nothing afterwards.

    Args:
        iterator: Result of ``iter(loader)``; an iterator without workers stays unchanged.
    """
    if isinstance(iterator, GeneratorType):
        iterator.close()  # a loader class of the script: its generator refers to torch's iterator
    elif isinstance(iterator, _Iterator) and _are_children(iterator._workers):  # noqa: SLF001 - no public way
        _request_end(*_parts_of(iterator))
        _kill_busy_workers(iterator)
        iterator._shutdown_workers()  # noqa: SLF001 - no public way


def end_persistent_workers(loader: Any) -> None:
    """End the workers that a loader keeps between epochs; its next iterator starts new ones."""
    if isinstance(getattr(loader, "_iterator", None), _Iterator):
        end_workers(loader._iterator)  # noqa: SLF001 - no public way
        loader._iterator = None  # noqa: SLF001 - as above


def end_workers_at_collection(iterator: object) -> None:
    """End the workers of an iterator before the garbage collector finalizes any of its parts."""
    if isinstance(iterator, _Iterator):
        weakref.finalize(iterator, _request_end, *_parts_of(iterator)).atexit = False


def is_persistent(loader: object) -> bool:
    """Return whether a loader keeps its workers between epochs."""
    return bool(getattr(loader, "persistent_workers", False))


def read_batches(loader: Any) -> Iterator[Any]:
    """Yield the batches of a loader; non-persistent workers end when the generator ends."""
    batches = iter(loader)
    try:
        yield from batches
    finally:
        if not is_persistent(loader):
            end_workers(batches)


def _are_children(workers: Sequence[Any]) -> bool:
    """Return False in a fork of the trainer, whose children the workers are not."""
    return all(worker._parent_pid == os.getpid() for worker in workers)  # noqa: SLF001 - no public way


def _parts_of(iterator: Any) -> tuple[Sequence[Any], Any, Sequence[Any]]:
    """Return the objects that end the workers, without a reference to the iterator and dataset."""
    workers, queues = iterator._workers, iterator._index_queues  # noqa: SLF001 - no public way
    return workers, iterator._workers_done_event, queues  # noqa: SLF001 - as above


def _request_end(workers: Sequence[Any], done: Any, queues: Sequence[Any]) -> None:
    """Request the end of all workers, then wait for all of them until one deadline."""
    if not _are_children(workers):
        return
    done.set()
    for worker, queue in zip(workers, queues, strict=False):
        if worker.is_alive():
            queue.put(None)
    clock = SystemClock()
    deadline_seconds = clock.monotonic_seconds() + _END_TIMEOUT_SECONDS
    for worker in workers:
        worker.join(max(0.0, deadline_seconds - clock.monotonic_seconds()))


def _kill_busy_workers(iterator: Any) -> None:
    """Kill the workers that did not end in time, so that torch raises no error about them."""
    busy = [item for item in iterator._workers if item.is_alive()]  # noqa: SLF001 - no public way
    if not busy:
        return
    if hasattr(iterator, "_pin_memory_thread"):
        # End the thread first: it would wait forever for the rest of a killed worker's message.
        iterator._pin_memory_thread_done_event.set()  # noqa: SLF001 - as above
        iterator._worker_result_queue.put((None, None))  # noqa: SLF001 - as above
        iterator._pin_memory_thread.join()  # noqa: SLF001 - as above
    if iterator._worker_pids_set:  # noqa: SLF001 - as above
        torch_utils.signal_handling._remove_worker_pids(id(iterator))  # noqa: SLF001 - as above
        iterator._worker_pids_set = False  # noqa: SLF001 - as above
    for worker in busy:
        worker.kill()
