"""The ledger of samples: its segments, and the proof that nothing was lost or trained twice."""
