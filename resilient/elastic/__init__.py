"""Keeps workers alive; knows processes, not tensors."""
