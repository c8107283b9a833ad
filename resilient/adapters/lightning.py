"""Former import path of :mod:`resilient.integrations.lightning`."""

from resilient.integrations.lightning import ResilientCheckpoint

__all__ = ["ResilientCheckpoint"]
