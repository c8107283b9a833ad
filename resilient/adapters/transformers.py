"""Former import path of :mod:`resilient.integrations.transformers`."""

from resilient.integrations.transformers import ResilientCallback

__all__ = ["ResilientCallback"]
