"""Checkpoints in a store: write, commit, verify, read, repair and delete, without torch."""
