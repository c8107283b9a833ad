"""The same bits at any world size: gradients of fixed micro-batches joined in one fixed tree."""
