"""Training data: sample order, and one position in it for the whole job."""
