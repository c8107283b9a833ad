"""Trainer with the names that the field already knows."""
