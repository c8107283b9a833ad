"""Model of a run: batches, precision, compilation, losses, weights and files beside them."""
