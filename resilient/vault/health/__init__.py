"""Is a repository whole, what is wrong with it, and how it is put right."""
