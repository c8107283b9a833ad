"""Saving of checkpoints: metadata, deduplication, persisting and save executors."""
