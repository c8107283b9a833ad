"""PURE: bytes to values and back. No I/O, no torch."""
