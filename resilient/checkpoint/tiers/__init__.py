"""Tiers: a near and a durable repository as one store, and near repositories of other hosts."""
