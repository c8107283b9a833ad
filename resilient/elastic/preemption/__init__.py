"""Preemption notices from clouds, schedulers, files and hooks."""
