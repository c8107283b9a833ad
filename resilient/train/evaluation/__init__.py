"""Every sample once, on any number of ranks, and what is made of it."""
