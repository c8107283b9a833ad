"""Where a run's wall clock went, from its event files alone. No torch, no clock, no store."""
