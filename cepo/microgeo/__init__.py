"""Builds the built-in toy task: problems, figures, and the tiny model that can learn to solve them on a CPU."""

from cepo.microgeo.world import SHAPES

__all__ = ["SHAPES"]
