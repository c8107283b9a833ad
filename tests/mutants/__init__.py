"""Deliberate defects, each with the tests that must detect it."""
