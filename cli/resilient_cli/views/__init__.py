"""Results of commands that several modules render."""
