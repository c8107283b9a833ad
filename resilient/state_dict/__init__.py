"""Live state to host bytes and back: the torch side."""
