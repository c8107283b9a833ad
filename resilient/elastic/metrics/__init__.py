"""What Prometheus is told: from the agent's events, the ranks' signs and the run's event files."""
