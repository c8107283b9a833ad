"""Object stores, which store bytes by key and know nothing of checkpoints."""
