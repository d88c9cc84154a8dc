"""HOW a model is wrapped: one file a strategy, found through a registry."""
