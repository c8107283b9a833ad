"""The trainer's public methods, by what they are about; the loop itself is in ``trainer``."""
