"""Bytes by key. Knows nothing of checkpoints."""
