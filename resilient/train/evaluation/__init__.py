"""Evaluation: every sample once on any number of ranks, and metrics."""
