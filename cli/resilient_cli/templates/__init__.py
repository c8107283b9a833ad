"""Templates of ``resilient init``."""
