"""Integrations with other trainers; each module needs its trainer installed."""
