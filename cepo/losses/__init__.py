"""Computes losses over response tokens, with pure functions of tensors: no model and no collective call."""
