"""How a model is parallel."""
