"""Conversion of the live state of training (torch objects) to host bytes and back."""
