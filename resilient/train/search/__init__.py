"""Hyper-parameter search: trials, studies and results."""
