"""Storage tiers: a near (fast) and a durable repository as one store, and tiers of other hosts."""
