"""Rank identity and the control plane: small values exchanged between ranks."""
