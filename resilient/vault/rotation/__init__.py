"""Old checkpoints are forgotten: look, decide, act."""
