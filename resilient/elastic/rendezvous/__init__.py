"""Rendezvous: nodes of a run, membership of an attempt, and agreement on its settings."""
