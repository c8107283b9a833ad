"""Save of a checkpoint: metadata, deduplication, persistence and save executors."""
