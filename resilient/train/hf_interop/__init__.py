"""Checkpoints of Hugging Face's Trainer, read and written without its code and without pickle."""
