"""Command line `resilient`."""
