"""Implements `cepo doctor`: checks whether training can start on this machine, and says how to fix what prevents it."""
