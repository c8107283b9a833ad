"""Benchmarks against peers, side by side in one run.

Ratios are comparable between machines; times are not.
"""
