"""Losses over response tokens. They are pure functions of tensors, without a model or a collective call."""
