"""The Qwen families: vision models with M-RoPE, and text models."""

from __future__ import annotations

from typing import Any

from tiny_checkpoints import templates, tokens
from tiny_checkpoints.parts import HEAD_DIM, HIDDEN_SIZE, IMAGE_MEAN, NUM_LAYERS, Parts, text_sizes, token_ids

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


def qwen2() -> Parts:
    """Text alone, with biases in the attention."""
    from transformers import Qwen2Config

    tokenizer = _tokenizer(tokens.QWEN_TEXT_TOKENS, templates.QWEN2)
    config = Qwen2Config(**text_sizes(tokenizer, tie_word_embeddings=True))
    return Parts(config=config, processor=tokenizer)


def qwen3() -> Parts:
    """Text alone, with normalised queries and keys."""
    from transformers import Qwen3Config

    tokenizer = _tokenizer(tokens.QWEN_TOKENS, templates.QWEN3)
    config = Qwen3Config(**text_sizes(tokenizer, head_dim=HEAD_DIM, tie_word_embeddings=True))
    return Parts(config=config, processor=tokenizer)


def qwen2_vl() -> Parts:
    """14-pixel patches, 4 to 64 image tokens an image; the head is tied to the embeddings."""
    from transformers import Qwen2VLConfig, Qwen2VLProcessor

    return _old_parts(Qwen2VLConfig, Qwen2VLProcessor, embed_dim=64, hidden_size=HIDDEN_SIZE, mlp_ratio=2)


def qwen2_5_vl() -> Parts:
    """14-pixel patches, windows of 2 x 2 image tokens in the tower's first block, the whole image in its second."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLProcessor

    tower = {"hidden_size": 64, "intermediate_size": 128, "out_hidden_size": HIDDEN_SIZE, "tokens_per_second": 2}
    return _old_parts(Qwen2_5_VLConfig, Qwen2_5_VLProcessor, window_size=56, fullatt_block_indexes=[1], **tower)


def qwen3_vl() -> Parts:
    """16-pixel patches and features of both tower blocks behind the first decoder layers."""
    from transformers import Qwen3VLConfig

    return _qwen3_vl_parts(Qwen3VLConfig, tied=True)


def qwen3_vl_moe() -> Parts:
    """As `qwen3_vl`, with 4 experts a layer, 2 of them for each token, and a head of its own."""
    from transformers import Qwen3VLMoeConfig

    # The real files hold an expert's matrices as (in, out), the model as (out, in).
    transposed = ("experts.gate_up_proj", "experts.down_proj")
    return _qwen3_vl_parts(Qwen3VLMoeConfig, tied=False, transposed=transposed, **_EXPERTS)


def qwen3_5() -> Parts:
    """Three layers of linear attention and one of full attention, with a gate on its output."""
    from transformers import Qwen3_5Config

    return _qwen3_5_parts(Qwen3_5Config)


def qwen3_5_moe() -> Parts:
    """As `qwen3_5`, with 4 experts a layer, 2 of them for each token, and a shared one."""
    from transformers import Qwen3_5MoeConfig

    return _qwen3_5_parts(Qwen3_5MoeConfig, shared_expert_intermediate_size=64, **_EXPERTS)


def _tokenizer(special_tokens: tuple[str, ...], template: str, kind: str = "Qwen2Tokenizer") -> Any:
    tokenizer = tokens.byte_level_tokenizer(special_tokens, kind=kind)
    tokenizer.chat_template = template
    return tokenizer


def _parts(
    config_class: Any,
    processor_class: Any,
    tokenizer: Any,
    text: dict[str, Any],
    tower: dict[str, Any],
    *,
    tied: bool,
    transposed: tuple[str, ...] = (),
) -> Parts:
    config = config_class(
        text_config=text_sizes(tokenizer, tie_word_embeddings=tied, **text),
        vision_config=tower,
        **token_ids(tokenizer, **_VISION_TOKENS),
        tie_word_embeddings=tied,
        dtype="float32",
    )
    processor = _processor(processor_class, tokenizer, tower["patch_size"])
    return Parts(config=config, processor=processor, transposed=transposed)


def _old_parts(config_class: Any, processor_class: Any, **tower: Any) -> Parts:
    tokenizer = _tokenizer(tokens.QWEN_TOKENS, templates.QWEN2_VL)
    tower |= {"depth": 2, "num_heads": 2, "patch_size": 14, "spatial_merge_size": _MERGE, "temporal_patch_size": 2}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": _SECTIONS}}
    return _parts(config_class, processor_class, tokenizer, rope, tower | {"dtype": "float32"}, tied=True)


def _rope(**others: Any) -> dict[str, Any]:
    return {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_interleaved": True,
        "mrope_section": _SECTIONS,
    } | others


def _qwen3_vl_parts(config_class: Any, *, tied: bool, transposed: tuple[str, ...] = (), **experts: Any) -> Parts:
    from transformers import Qwen3VLProcessor

    text = {"head_dim": HEAD_DIM, "rope_parameters": _rope(), **experts}
    tokenizer, tower = _tokenizer(tokens.QWEN_TOKENS, templates.QWEN3_VL), _tower(deepstack_visual_indexes=[0, 1])
    return _parts(config_class, Qwen3VLProcessor, tokenizer, text, tower, tied=tied, transposed=transposed)


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


def _qwen3_5_parts(config_class: Any, **experts: int) -> Parts:
    from transformers import Qwen3VLProcessor

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
        **experts,
    }
    return _parts(config_class, Qwen3VLProcessor, tokenizer, text, _tower(), tied=False)


def _processor(processor_class: Any, tokenizer: Any, patch_size: int) -> Any:
    """An image has 4 to 64 tokens of 2 x 2 patches."""
    from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    is_new = processor_class is Qwen3VLProcessor
    pixels_per_token = (patch_size * _MERGE) ** 2
    options: dict[str, Any] = {
        "patch_size": patch_size,
        "merge_size": _MERGE,
        "temporal_patch_size": 2,
        "image_mean": IMAGE_MEAN,
        "image_std": IMAGE_MEAN,
    }
    size = {"shortest_edge": _MIN_TOKENS * pixels_per_token, "longest_edge": _MAX_TOKENS * pixels_per_token}
    videos = Qwen3VLVideoProcessor if is_new else Qwen2VLVideoProcessor
    return processor_class(
        image_processor=Qwen2VLImageProcessor(size=size, **options),
        tokenizer=tokenizer,
        video_processor=videos(size=size, **options),
        chat_template=tokenizer.chat_template,
    )
