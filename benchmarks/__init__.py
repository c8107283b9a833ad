"""Benchmarks of this project and of comparable libraries (peers), side by side in one run.

Ratios are comparable between machines; times are not.
"""
