"""Goodput of a run, the share of time spent on useful training, computed from event files."""
