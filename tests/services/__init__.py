"""Real services, installed, started on loopback and stopped by tests; and a proxy with faults."""
