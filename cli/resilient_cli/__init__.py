"""The command line `resilient`."""
