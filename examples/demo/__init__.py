"""A run that is killed and goes on, beside one that never was: ``make demo``."""
