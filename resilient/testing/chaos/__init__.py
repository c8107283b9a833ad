"""Chaos experiments: a user's own run under injected faults, compared with an undisturbed run."""
