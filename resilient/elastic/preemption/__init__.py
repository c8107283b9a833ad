"""Who says that this host will be taken away: clouds, schedulers, files, hooks."""
