"""The nodes of a run: who belongs to a life, and what all of them are told."""
