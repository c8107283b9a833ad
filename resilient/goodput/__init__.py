"""Goodput of a run, computed only from its event files, without torch, clock or store."""
