"""Former import path of :mod:`resilient.integrations.accelerate`."""

from resilient.integrations.accelerate import AcceleratorCheckpointer

__all__ = ["AcceleratorCheckpointer"]
