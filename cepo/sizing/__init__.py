"""Estimates a run's memory from the model's shape and decides whether it fits, needs a sleeping engine, or is refused."""
