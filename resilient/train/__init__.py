"""Trainer with the class, method and argument names of Hugging Face's Trainer."""
