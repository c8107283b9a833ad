"""Memory of the device and of the process: given back, and measured."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from typing import Any

import torch


def empty_cache(device: torch.device, *, collect: bool = False) -> None:
    """Give memory that is free but kept back to the device, or on the CPU to the system.

    Works for every device whose module in torch can (cuda, mps, xpu, npu, hpu, mlu, musa).

    Args:
        device: whose.
        collect: first find what is unreachable and not yet freed; takes a moment.
    """
    if collect:
        gc.collect()
    module: Any = getattr(torch, device.type, None)
    if device.type == "cpu":
        # Of the C libraries only glibc has it, and the others need none.
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
    elif hasattr(module, "empty_cache"):
        module.empty_cache()
