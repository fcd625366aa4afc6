"""Extracts and compares answers, and loads reward functions and runs them in a pool of processes."""
