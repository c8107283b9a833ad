"""Hyper-parameter search: trials, studies and what they found."""
