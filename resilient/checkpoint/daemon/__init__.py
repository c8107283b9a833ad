"""Saver daemon: the process per host that owns staged bytes, and its client in each rank."""
