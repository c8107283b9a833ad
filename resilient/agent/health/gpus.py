"""What the devices of this host report by themselves: Xid errors and ECC, through NVML.

Needs ``pip install resilient-train[gpu]`` (nvidia-ml-py); without it, or without a driver,
nothing is watched. Which Xid means a broken device is from NVIDIA's "XID Errors" (r575).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

from resilient.events import Event, Level

# Double-bit ECC, row remapping, NVLink, off the bus, contained and uncontained ECC, GSP.
BROKEN_XIDS = frozenset({48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140})
_CHECKS_MAX = 64


@dataclass(frozen=True, slots=True)
class GpuFaulted(Event):
    """A device reported an error.

    Attributes:
        device: its number on this host.
        kind: ``xid``, ``ecc_double_bit`` or ``ecc_single_bit``.
        number: the Xid's; 0 for ECC.
        is_broken: whether the device needs a reset or a technician.
    """

    level: ClassVar[Level] = Level.WARNING
    device: int
    kind: str
    number: int
    is_broken: bool

    def line(self) -> str:
        """Name device and error, and what to do."""
        what = f"Xid {self.number}" if self.kind == "xid" else self.kind.replace("_", " ")
        hint = "; drain this host: nvidia-smi -q, dmesg | grep Xid" if self.is_broken else ""
        return f"GPU {self.device} reported {what}{hint}"


class GpuWatch:
    """Asks the driver for errors of all devices; never waits."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._events: Any = None

    def start(self) -> bool:
        """Begin to listen; False where there is nothing to listen to."""
        try:
            nvml = import_module("pynvml")
        except ImportError:
            return False
        try:
            nvml.nvmlInit()
            self._events = nvml.nvmlEventSetCreate()
            for number in range(nvml.nvmlDeviceGetCount()):
                device = nvml.nvmlDeviceGetHandleByIndex(number)
                wanted = (
                    nvml.nvmlEventTypeXidCriticalError
                    | nvml.nvmlEventTypeDoubleBitEccError
                    | nvml.nvmlEventTypeSingleBitEccError
                )
                supported = nvml.nvmlDeviceGetSupportedEventTypes(device) & wanted
                if supported:
                    nvml.nvmlDeviceRegisterEvents(device, supported, self._events)
        except nvml.NVMLError:
            return False
        self._nvml = nvml
        return True

    def look(self) -> list[GpuFaulted]:
        """Return the errors that were reported since the last call."""
        nvml, found = self._nvml, []
        for _ in range(_CHECKS_MAX if nvml is not None else 0):
            try:
                data = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError:  # a timeout is one: nothing more is there
                break
            found.append(self._fault(data))
        return found

    def _fault(self, data: Any) -> GpuFaulted:
        nvml = self._nvml
        kinds = {
            nvml.nvmlEventTypeXidCriticalError: "xid",
            nvml.nvmlEventTypeDoubleBitEccError: "ecc_double_bit",
            nvml.nvmlEventTypeSingleBitEccError: "ecc_single_bit",
        }
        kind = kinds.get(data.eventType, "xid")
        xid = int(data.eventData) if kind == "xid" else 0
        is_broken = kind == "ecc_double_bit" or xid in BROKEN_XIDS
        return GpuFaulted(nvml.nvmlDeviceGetIndex(data.device), kind, xid, is_broken)
