"""Saves and loads of peers, measured beside ours on the same live state."""
