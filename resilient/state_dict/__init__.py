"""Conversion of live training state to host bytes and back: the torch side."""
