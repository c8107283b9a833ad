"""Integrations with other trainers.

Each module needs the installed package of its trainer.
"""
