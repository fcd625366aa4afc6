"""The Qwen families: vision models with M-RoPE, and text models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiny_checkpoints import templates, tokens
from tiny_checkpoints.parts import HEAD_DIM, HIDDEN_SIZE, IMAGE_MEAN, NUM_LAYERS, Parts, assemble, text_sizes, token_ids

_MERGE = 2
_MIN_TOKENS, _MAX_TOKENS = 4, 64
# Half of a head's channels, shared among time, height and width.
_SECTIONS = [4, 6, 6]
_VISION_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
# `norm_topk_prob` is in the real files and read by vLLM alone: transformers always normalises.
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
# The real files hold an expert's matrices as (in, out), the model as (out, in).
_TRANSPOSED = ("experts.gate_up_proj", "experts.down_proj")


def _text(name: str, special_tokens: tuple[str, ...], template: str, **sizes: Any) -> Parts:
    tokenizer = _tokenizer(special_tokens, template)
    return assemble(name, tokenizer, config=text_sizes(tokenizer, tie_word_embeddings=True, **sizes))


def _old(name: str, **tower: Any) -> Parts:
    """14-pixel patches; the head is tied to the embeddings."""
    tower |= {"depth": 2, "num_heads": 2, "patch_size": 14, "spatial_merge_size": _MERGE, "temporal_patch_size": 2}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": _SECTIONS}}
    tokenizer = _tokenizer(tokens.QWEN_TOKENS, templates.QWEN2_VL)
    return _vision(name, tokenizer, rope, tower | {"dtype": "float32"}, tied=True, is_new=False)


def _new(name: str, *, tied: bool, transposed: tuple[str, ...] = (), **experts: Any) -> Parts:
    """16-pixel patches and features of both tower blocks behind the first decoder layers."""
    text = {"head_dim": HEAD_DIM, "rope_parameters": _rope(), **experts}
    tokenizer, tower = _tokenizer(tokens.QWEN_TOKENS, templates.QWEN3_VL), _tower(deepstack_visual_indexes=[0, 1])
    return _vision(name, tokenizer, text, tower, tied=tied, is_new=True, transposed=transposed)


def _linear(name: str, **experts: int) -> Parts:
    """Three layers of linear attention and one of full attention, with a gate on its output."""
    tokenizer = _tokenizer((*tokens.QWEN_TOKENS, "<think>", "</think>"), templates.QWEN3_5, "Qwen3_5Tokenizer")
    text = {
        "num_hidden_layers": 2 * NUM_LAYERS,
        "head_dim": 64,
        "rope_parameters": _rope(partial_rotary_factor=0.5),
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    return _vision(name, tokenizer, text | experts, _tower(), tied=False, is_new=True)


def _vision(
    name: str, tokenizer: Any, text: dict[str, Any], tower: dict[str, Any], *, tied: bool, is_new: bool, **parts: Any
) -> Parts:
    """An image has 4 to 64 tokens of 2 x 2 patches."""
    config = {
        "text_config": text_sizes(tokenizer, tie_word_embeddings=tied, **text),
        "vision_config": tower,
        **token_ids(tokenizer, **_VISION_TOKENS),
        "tie_word_embeddings": tied,
        "dtype": "float32",
    }
    of_token = (tower["patch_size"] * _MERGE) ** 2
    pixels = {"patch_size": tower["patch_size"], "merge_size": _MERGE, "temporal_patch_size": 2}
    pixels |= {"image_mean": IMAGE_MEAN, "image_std": IMAGE_MEAN}
    pixels["size"] = {"shortest_edge": _MIN_TOKENS * of_token, "longest_edge": _MAX_TOKENS * of_token}
    return assemble(
        name,
        tokenizer,
        config=config,
        processor="Qwen3VL" if is_new else name,
        images=("Qwen2VL", pixels),
        videos=("Qwen3VL" if is_new else "Qwen2VL", pixels),
        options={"chat_template": tokenizer.chat_template},
        **parts,
    )


def _tokenizer(special_tokens: tuple[str, ...], template: str, kind: str = "Qwen2Tokenizer") -> Any:
    tokenizer = tokens.byte_level_tokenizer(special_tokens, kind=kind)
    tokenizer.chat_template = template
    return tokenizer


def _rope(**others: Any) -> dict[str, Any]:
    interleaved = {"mrope_interleaved": True, "mrope_section": _SECTIONS}
    return {"rope_type": "default", "rope_theta": 10000.0, **interleaved, **others}


def _tower(**others: Any) -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_merge_size": _MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": HIDDEN_SIZE,
        "num_position_embeddings": 16,
        "dtype": "float32",
    } | others


_WINDOWS = {"window_size": 56, "fullatt_block_indexes": [1], "hidden_size": 64, "intermediate_size": 128}

FAMILIES: dict[str, Callable[[], Parts]] = {
    "qwen2": lambda: _text("Qwen2", tokens.QWEN_TEXT_TOKENS, templates.QWEN2),  # with biases in the attention
    "qwen3": lambda: _text(
        "Qwen3", tokens.QWEN_TOKENS, templates.QWEN3, head_dim=HEAD_DIM
    ),  # normalises queries and keys
    "qwen2_vl": lambda: _old("Qwen2VL", embed_dim=64, hidden_size=HIDDEN_SIZE, mlp_ratio=2),
    # Windows of 2 x 2 image tokens in the tower's first block, the whole image in its second.
    "qwen2_5_vl": lambda: _old("Qwen2_5_VL", **_WINDOWS, out_hidden_size=HIDDEN_SIZE, tokens_per_second=2),
    "qwen3_vl": lambda: _new("Qwen3VL", tied=True),
    # 4 experts a layer, 2 of them for each token, and a head of its own.
    "qwen3_vl_moe": lambda: _new("Qwen3VLMoe", tied=False, transposed=_TRANSPOSED, **_EXPERTS),
    "qwen3_5": lambda: _linear("Qwen3_5"),
    "qwen3_5_moe": lambda: _linear("Qwen3_5Moe", shared_expert_intermediate_size=64, **_EXPERTS),
}
