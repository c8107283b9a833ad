"""Canonical reduction: equal bits at any world size, by one fixed tree of micro-batches."""
