"""Former import paths of :mod:`resilient.integrations`, kept for scripts that use them."""
