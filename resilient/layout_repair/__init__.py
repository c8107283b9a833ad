"""What is damaged of a checkpoint that another tool wrote, made whole in a new place."""
