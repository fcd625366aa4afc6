"""Compares methods with the truth: their credit with Monte-Carlo values."""
