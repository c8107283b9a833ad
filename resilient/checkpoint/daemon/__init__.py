"""Saver daemon, a process per host that writes checkpoints in the background, and its clients."""
