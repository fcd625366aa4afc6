"""Losses over response tokens. Pure: tensors in, tensors out; no model, no collective call."""
