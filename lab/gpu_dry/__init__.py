"""Finds, on a machine without a GPU, faults that would otherwise appear on one: see lab/notes/gpu-dry.md."""
