"""Verified reads of checkpoints from storage or shared memory, with reconstruction of damage."""
