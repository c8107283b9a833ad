"""Host bytes to committed checkpoints and back: the storage side."""
