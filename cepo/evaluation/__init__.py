"""Accuracy of a model on problems and benchmarks, with errors, and two such evaluations against each other."""
