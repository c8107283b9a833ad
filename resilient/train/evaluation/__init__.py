"""Evaluation of every sample exactly once on any number of ranks, and metrics."""
