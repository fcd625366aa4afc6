"""A second trainer, written from the equations: plain transformers with eager attention, one row at a time, NumPy, AdamW.

It imports nothing of `cepo`. Given the same checkpoint, problems and responses, `cepo` is held to its weights after an update.
It computes every row, skips nothing, shares nothing, and is as slow as that.
"""
