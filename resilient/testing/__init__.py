"""Shipped for users: a reference store, faults, and ranks as threads."""
