"""Repair of checkpoints of other tools; the result is written to a new place."""
