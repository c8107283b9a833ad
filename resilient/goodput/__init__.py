"""Goodput of a run, computed from its event files alone. No torch, no clock, no store."""
