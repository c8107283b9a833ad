"""Committed checkpoint to proved bytes, from storage, from memory or mended."""
