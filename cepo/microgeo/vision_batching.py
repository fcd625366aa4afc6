"""Vision attention over many pictures of one size as one batched call.

transformers attends picture by picture, which for hundreds of 64x64 pictures costs more than the arithmetic. The
numbers are the same up to float rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import Qwen3VLForConditionalGeneration


@contextmanager
def batched_vision_attention(model: Qwen3VLForConditionalGeneration) -> Iterator[None]:
    """Inside, pictures of equal size are attended to in one call; batches of mixed sizes go the usual way."""
    attentions = [block.attn for block in model.model.visual.blocks]
    for attention in attentions:
        attention.forward = partial(_forward, attention, attention.forward)
    try:
        yield
    finally:
        for attention in attentions:
            del attention.forward


def _forward(
    attention: Any,
    usual_forward: Any,
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    **kwargs: Any,
) -> Tensor:
    from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision

    lengths = cu_seqlens.diff()
    if not bool((lengths == lengths[0]).all()):
        return usual_forward(hidden_states, cu_seqlens=cu_seqlens, position_embeddings=position_embeddings, **kwargs)
    num_pictures = len(lengths)
    num_patches = hidden_states.shape[0] // num_pictures
    query, key, value = attention.qkv(hidden_states).view(-1, 3, attention.num_heads, attention.head_dim).unbind(1)
    query, key = apply_rotary_pos_emb_vision(query, key, *position_embeddings)

    def by_picture(states: Tensor) -> Tensor:
        return states.view(num_pictures, num_patches, attention.num_heads, attention.head_dim).transpose(1, 2)

    attended = torch.nn.functional.scaled_dot_product_attention(
        by_picture(query), by_picture(key), by_picture(value), scale=attention.scaling
    )
    return attention.proj(attended.transpose(1, 2).reshape(hidden_states.shape))
