"""Readers for checkpoints of other tools, which import no torch and unpickle nothing."""
