"""The control plane under virtual time, a faulty network and a faulty store (ADR 0048)."""
