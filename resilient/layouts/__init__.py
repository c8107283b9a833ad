"""Checkpoints of other tools, read without torch, without unpickling and without their code."""
