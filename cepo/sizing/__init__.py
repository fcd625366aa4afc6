"""Estimates a run's memory from the model's shape and decides whether it fits, and whether vLLM has to sleep."""
