"""Measures the accuracy of a model on problems and benchmarks, with standard errors, and compares two evaluations."""
