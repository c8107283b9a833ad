"""The keeper of this host, as the agent sees it."""
