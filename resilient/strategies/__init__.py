"""Parallelism strategies of a model."""
