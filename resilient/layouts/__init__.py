"""Readers of checkpoints that other tools wrote; they neither import torch nor unpickle."""
