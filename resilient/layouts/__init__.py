"""Readers for checkpoints of other tools, without torch, unpickling or their code."""
