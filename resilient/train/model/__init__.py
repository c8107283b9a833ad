"""Model and weights: precision, compilation, noise, losses, and the files beside weights."""
