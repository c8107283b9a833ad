"""Formats of a checkpoint: pure conversion of bytes to values and back, without I/O or torch."""
