"""Rank identity, and the control plane: exchange of small values between ranks."""
