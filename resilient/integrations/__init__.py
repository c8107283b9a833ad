"""Other trainers, saving and resuming through us; each module needs its peer installed."""
