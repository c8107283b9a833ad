"""What is not written again because it has not changed."""
