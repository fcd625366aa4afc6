"""Measures methods against the truth: their credit against Monte-Carlo values, and the signal in their gradients."""
