"""Object stores: bytes by key, without knowledge of checkpoints."""
