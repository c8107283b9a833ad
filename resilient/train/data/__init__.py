"""Training data: sample order, and the data position of the whole job."""
