"""Comparison of two checkpoints of any layout and world size, in bounded memory."""
