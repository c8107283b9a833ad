"""Readers for checkpoints of other tools, which need neither torch nor the tools' code."""
