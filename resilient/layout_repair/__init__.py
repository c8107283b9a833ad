"""Repair of checkpoints that other tools wrote; a repair writes a new checkpoint."""
