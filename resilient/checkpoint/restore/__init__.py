"""Verified reads of committed checkpoints: from storage, from memory, or reconstructed."""
