"""Prometheus metrics from the agent's events, the ranks' heartbeats and the run's event files."""
