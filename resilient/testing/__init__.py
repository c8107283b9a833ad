"""Test tools for users: reference store, injected faults, ranks as threads, chaos experiments."""
