"""Repair of checkpoints of other tools, written to a new place."""
