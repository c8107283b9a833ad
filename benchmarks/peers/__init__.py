"""What others do to save and to load, next to what we do, on the same live state."""
