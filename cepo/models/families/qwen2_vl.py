"""Supports Qwen2-VL and Qwen2.5-VL, with M-RoPE positions and one feature vector per image token.

Videos are not supported: the positions of text after a video continue after the frame's sides in transformers, but
after the last temporal position in vLLM, so sampled and trained log-probs would disagree.
"""

from __future__ import annotations

from cepo.models.families.grid import GridFamily


class Qwen2VL(GridFamily):
    """Supports Qwen2-VL."""

    title = "Qwen2-VL"
    model_types = ("qwen2_vl",)


class Qwen25VL(GridFamily):
    """Supports Qwen2.5-VL, the model of most of EasyR1's scripts."""

    title = "Qwen2.5-VL"
    model_types = ("qwen2_5_vl",)
