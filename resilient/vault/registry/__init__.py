"""What exists and who wrote it: lives, checkpoints, their commit, signatures, tags, what may go."""
