"""Estimates a run's memory from the model's shape and decides whether it fits, with a sleeping engine or without."""
