"""What is done to a model and to its weights: precision, compiling, noise, losses, files."""
