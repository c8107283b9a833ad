"""What the ranks of this host are seen to do, and what follows from its absence."""
