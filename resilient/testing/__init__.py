"""Test tools for users: stores in memory, injected faults, ranks as threads, chaos experiments."""
