"""Sum of gradients in one fixed tree over micro-batches, with equal bits at any world size."""
