"""A run as one page that needs nothing beside it: no script, no font, no network."""
