"""The families of other makers: a vision tower, a projector and a text model with one-axis positions."""

from __future__ import annotations

from typing import Any

from tiny_checkpoints import templates, tokens
from tiny_checkpoints.parts import HEAD_DIM, IMAGE_MEAN, Parts, assemble, text_sizes, token_ids

_TOWER_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "dtype": "float32",
}
_SIGLIP_NAMES = {"vision_tower.": "vision_tower.vision_model."}
_NORMALISED: dict[str, Any] = {"image_mean": IMAGE_MEAN, "image_std": IMAGE_MEAN}
_TILES: dict[str, Any] = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}, **_NORMALISED}


def internvl() -> Parts:
    """Tiles of 56 x 56 pixels with 4 tokens each, up to 4 by the image's shape, and a thumbnail where there are several."""
    side, per_tile = 56, {"image_seq_length": 4}
    named = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    tokenizer = tokens.byte_level_tokenizer(tokens.INTERNVL_TOKENS, named=named | {"video_token": "<video>"})
    tower = {"image_size": [side, side], "patch_size": [14, 14], "attention_bias": True, "use_mean_pooling": True}
    config = {
        "text_config": {"model_type": "qwen2", **text_sizes(tokenizer, tie_word_embeddings=False)},
        "vision_config": _TOWER_SIZES | tower,
        **token_ids(tokenizer, image_token_id="<IMG_CONTEXT>"),
        "downsample_ratio": 0.5,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    size = {"size": {"height": side, "width": side}, **_NORMALISED}
    return assemble(
        "InternVL",
        tokenizer,
        config=config | per_tile,
        images=("GotOcr2", size | {"crop_to_patches": True, "max_patches": 4}),
        videos=("InternVL", size),
        options={"chat_template": templates.INTERNVL, **per_tile},
    )


def smolvlm() -> Parts:
    """An image becomes 64 pixels wide, tiles of 32 x 32 pixels with 4 tokens each, and the whole image as one more."""
    named = {"fake_image_token": "<fake_token_around_image>", "image_token": "<image>"}
    named |= {"end_of_utterance_token": "<end_of_utterance>", "global_image_token": "<global-img>"}
    ends = {"begin": "<|im_start|>", "end": "<end_of_utterance>", "pad": "<|im_end|>"}
    tokenizer = tokens.byte_level_tokenizer(tokens.SMOLVLM_TOKENS, **ends, kind="GPT2Tokenizer", named=named)
    side = {"longest_edge": 32}
    videos = {"size": side, "max_image_size": side, "num_frames": 4, "fps": 1, **_NORMALISED}
    return _idefics("SmolVLM", tokenizer, templates.SMOLVLM, ("<end_of_utterance>",), videos=("SmolVLM", videos))


def idefics3() -> Parts:
    """The same tiles and tower as `smolvlm`, with Llama 3's special tokens."""
    ends = {"begin": "<|begin_of_text|>", "end": "<|end_of_text|>", "pad": "<|finetune_right_pad_id|>", "unknown": None}
    tokenizer = tokens.byte_level_tokenizer(tokens.IDEFICS3_TOKENS, **ends, kind="PreTrainedTokenizerFast")
    return _idefics("Idefics3", tokenizer, templates.IDEFICS3, ("<end_of_utterance>", "<|end_of_text|>"))


def _idefics(name: str, tokenizer: Any, template: str, end_tokens: tuple[str, ...], **parts: Any) -> Parts:
    """Tiles of 4 x 4 patches, of which 2 x 2 make a token, in front of a Llama."""
    text = text_sizes(tokenizer, tie_word_embeddings=False, head_dim=HEAD_DIM)
    config = {
        "text_config": {"model_type": "llama", **text},
        "vision_config": _TOWER_SIZES | {"image_size": 32, "patch_size": 8},
        "scale_factor": 2,
        "pad_token_id": tokenizer.pad_token_id,
        **token_ids(tokenizer, image_token_id="<image>"),
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    options = {"chat_template": template, "image_seq_len": 4}
    return assemble(
        name, tokenizer, config=config, images=(name, _TILES), options=options, end_tokens=end_tokens, **parts
    )


def gemma3() -> Parts:
    """4 tokens an image that see each other, a layer that sees 32 tokens back and one that sees all."""
    side, per_image = 56, 4
    tokenizer = tokens.gemma_tokenizer()
    layers = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
    heads = {"head_dim": HEAD_DIM, "query_pre_attn_scalar": HEAD_DIM}
    marks = {"boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"}
    config = {
        "text_config": text_sizes(tokenizer, **heads, **layers, tie_word_embeddings=True),
        "vision_config": _TOWER_SIZES | {"image_size": side, "patch_size": 14, "vision_use_head": False},
        "mm_tokens_per_image": per_image,
        **token_ids(tokenizer, **marks, image_token_index="<image_soft_token>"),
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    return assemble(
        "Gemma3",
        tokenizer,
        config=config,
        images=("Gemma3", {"size": {"height": side, "width": side}, **_NORMALISED}),
        options={"chat_template": templates.GEMMA3, "image_seq_length": per_image},
        end_tokens=("<eos>", "<end_of_turn>"),
        renamed=_SIGLIP_NAMES,
    )


def llava_onevision() -> Parts:
    """The whole image as 4 tokens, then tiles of 28 x 28 pixels without their padding, with a newline behind each row."""
    side = 28
    sides = [side * tiles for tiles in (1, 2, 3)]
    pinpoints = {"image_grid_pinpoints": [[height, width] for height in sides for width in sides]}
    tokenizer = tokens.byte_level_tokenizer(tokens.LLAVA_TOKENS)
    tower = {"model_type": "siglip_vision_model", "image_size": side, "patch_size": 14, "vision_use_head": False}
    config = {
        "text_config": {"model_type": "qwen2", **text_sizes(tokenizer, tie_word_embeddings=True)},
        "vision_config": _TOWER_SIZES | tower,
        **token_ids(tokenizer, image_token_index="<image>", video_token_index="<video>"),
        "dtype": "float32",
    }
    size = {"size": {"height": side, "width": side}, **_NORMALISED}
    features = {"num_image_tokens": 4, "vision_feature_select_strategy": "full"}
    return assemble(
        "LlavaOnevision",
        tokenizer,
        config=config | pinpoints,
        images=("LlavaOnevision", size | pinpoints),
        videos=("LlavaOnevision", size),
        options={"chat_template": templates.LLAVA_ONEVISION, **features},
        renamed=_SIGLIP_NAMES,
    )


FAMILIES = {build.__name__: build for build in (internvl, smolvlm, idefics3, gemma3, llava_onevision)}
