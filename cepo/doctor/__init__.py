"""Implements `cepo doctor`: checks whether training can start on this machine, and says what to do where it cannot."""
