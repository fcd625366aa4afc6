"""Finds, on a machine without a GPU, faults that would otherwise appear on one: see docs/gpu-dry.md."""
