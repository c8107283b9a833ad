"""Trainer with the names of Hugging Face's Trainer."""
