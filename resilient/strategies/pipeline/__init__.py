"""A model cut into stages, one after another, each on ranks of its own."""
