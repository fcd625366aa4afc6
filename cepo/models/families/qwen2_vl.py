"""Qwen2-VL and Qwen2.5-VL: M-RoPE over plain features.

Qwen2.5-VL's tower attends within windows and, in some layers, within an image; both are the tower's own affair. Videos are not
read: the text behind one has other positions in transformers (it goes on behind the frame's sides) than in vLLM (behind the
last temporal position), so that sampled and trained log-probs would disagree.
"""

from __future__ import annotations

from cepo.models.families.grid import GridFamily


class Qwen2VL(GridFamily):
    """Qwen2-VL."""

    title = "Qwen2-VL"
    model_types = ("qwen2_vl",)


class Qwen25VL(GridFamily):
    """Qwen2.5-VL, which most of EasyR1's scripts name."""

    title = "Qwen2.5-VL"
    model_types = ("qwen2_5_vl",)
