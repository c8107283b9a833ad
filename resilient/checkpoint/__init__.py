"""Storage side of checkpoints: from host bytes to committed checkpoints and back."""
