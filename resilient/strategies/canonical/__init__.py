"""Canonical reduction: one fixed tree of micro-batches gives equal bits at any world size."""
