"""Memory of the device and of the process: release and measurement."""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from resilient.storage.shared_memory import available_memory_bytes


def empty_cache(device: torch.device, *, collect: bool = False) -> None:
    """Return cached free memory to the device; on the CPU, to the operating system.

    Works for every device whose torch module supports it (cuda, mps, xpu, npu, hpu, mlu, musa).

    Args:
        device: Device of the cache.
        collect: Collect unreachable objects first, which takes time.
    """
    if collect:
        gc.collect()
    module: Any = getattr(torch, device.type, None)
    if device.type == "cpu":
        # Only glibc has `malloc_trim`. Other C libraries do not need it.
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
    elif hasattr(module, "empty_cache"):
        module.empty_cache()


class MemoryMeter:
    """Memory use of a stage: construction of the trainer, training, one evaluation.

    On a CPU the meter uses the resident memory of this process, on an accelerator the memory that
    torch allocated. ``alloc_delta`` is the memory that the stage kept. ``peaked_delta`` is the
    additional temporary memory. Both are in bytes. Peaks come from the kernel and the allocator, so
    no sampling is needed.

    Args:
        device: Device of the model.
        is_on: ``skip_memory_metrics`` is False.
    """

    def __init__(self, device: torch.device, *, is_on: bool) -> None:
        self._is_on = is_on
        self._module: Any = getattr(torch, device.type, None) if device.type != "cpu" else None
        self._device = device
        self._stage = ""
        self._before: dict[str, int] = {}
        self._figures: dict[str, float] = {}

    def start(self, stage: str) -> None:
        """Begin a stage. An evaluation inside another stage is not measured."""
        if not self._is_on or (self._stage and stage != "train"):
            return
        self._stage = stage
        empty_cache(self._device, collect=True)
        _forget_peak(self._module)
        self._before = self._now()
        if stage == "init":
            self._figures |= {
                f"before_init_mem_{device}": size for device, size in self._before.items()
            }

    def stop(self, stage: str) -> dict[str, float]:
        """End a stage and return its metrics; the metrics of ``init`` come with the next stage."""
        if not self._is_on or self._stage != stage:
            return {}
        self._stage = ""
        peaks = _peaks(self._module, self._device)
        empty_cache(self._device, collect=True)
        figures = dict(self._figures)
        self._figures = {}
        for device, allocated_bytes in self._now().items():
            figures[f"{stage}_mem_{device}_alloc_delta"] = allocated_bytes - self._before[device]
            figures[f"{stage}_mem_{device}_peaked_delta"] = max(0, peaks[device] - allocated_bytes)
        if stage == "init":
            self._figures, figures = figures, {}
        return figures

    def leave(self) -> None:
        """End a stage that failed."""
        self._stage = ""

    def _now(self) -> dict[str, int]:
        bytes_by_device = {"cpu": resident_bytes()}
        if self._module is not None:
            bytes_by_device["gpu"] = self._module.memory_allocated(self._device)
        return bytes_by_device


def resident_bytes() -> int:
    """Return this process's resident memory in bytes; the peak if the size is unknown."""
    return _status("VmRSS") or _peak_rss()


def _peaks(module: Any, device: torch.device) -> dict[str, int]:
    peaks = {"cpu": _status("VmHWM") or _peak_rss()}
    if module is not None:
        peaks["gpu"] = module.max_memory_allocated(device)
    return peaks


def _forget_peak(module: Any) -> None:
    """Reset the peaks."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    if module is not None:
        module.reset_peak_memory_stats()


def _status(name: str) -> int:
    """Return a size in bytes that Linux reports for this process; 0 on other systems."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return int(value.split()[0]) << 10
    return 0


def _peak_rss() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts KiB, macOS bytes.
    return peak if sys.platform == "darwin" else peak << 10


def used_share(device: torch.device) -> float:
    """Return the used share of the memory available to this process, from 0 to 1."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return 1 - free / total
    available_bytes, used_bytes = available_memory_bytes(), resident_bytes()
    return 0.0 if available_bytes is None else used_bytes / (used_bytes + max(available_bytes, 0))
