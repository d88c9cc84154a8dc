"""Loaders: sharding the index stream, order, tails, resume."""
