"""Training with canonical reduction: who computes which micro-batch does not show in the result."""
