"""The process per host that owns staged bytes, and a rank's side of it."""
