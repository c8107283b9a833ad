"""Trainer callbacks: base class, built-in callbacks and the save schedule."""
