"""Deliberate defects of the durability code, each with the tests that must notice."""
