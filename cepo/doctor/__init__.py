"""Checks whether training can start on this machine, and a run before it starts."""
