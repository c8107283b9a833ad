"""The trainer, with the names the field already knows."""
