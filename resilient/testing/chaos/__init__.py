"""A user's own run under faults on purpose, held against one that nothing happened to."""
