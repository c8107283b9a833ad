"""Objects of a store as proved bytes: asked for again, called damage, several at once."""
