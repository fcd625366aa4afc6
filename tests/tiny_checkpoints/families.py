"""What the checkpoint folders of each family are made of: a tiny configuration and processor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tiny_checkpoints import templates, tokens

HIDDEN_SIZE = 64
HEAD_DIM = 32
NUM_LAYERS = 2
MAX_POSITIONS = 2048
IMAGE_MEAN = [0.5, 0.5, 0.5]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A family's configuration and processor, both tiny.

    Attributes:
        processor: the tokenizer for a text model.
        end_tokens: texts of the tokens that end a response.
        transposed: ends of the names of tensors whose last two axes change places in the published files.
        renamed: starts of the names of tensors that transformers writes, and what published files have in their place.
        scaled: ends of the names of norms whose weights are not 1, and their value.
    """

    config: Any
    processor: Any
    end_tokens: tuple[str, ...] = ("<|im_end|>", "<|endoftext|>")
    transposed: tuple[str, ...] = ()
    renamed: dict[str, str] = field(default_factory=dict)
    scaled: dict[str, float] = field(default_factory=dict)


def token_ids(tokenizer: Any, **tokens: str) -> dict[str, int]:
    """The ids of the tokens, under the names that the configuration gives them."""
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}


def text_sizes(tokenizer: Any, **others: Any) -> dict[str, Any]:
    """The entries that the text models of all families share."""
    return {
        "vocab_size": -(-len(tokenizer) // 64) * 64,  # as in real checkpoints, where some ids have no token
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 2 * HIDDEN_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    } | others


def assemble(
    name: str,
    tokenizer: Any,
    *,
    config: dict[str, Any],
    processor: str | None = None,
    images: tuple[str, dict[str, Any]] | None = None,
    videos: tuple[str, dict[str, Any]] | None = None,
    options: dict[str, Any] | None = None,
    **parts: Any,
) -> Parts:
    """Builds configuration and processor from transformers' classes, each given by its name's start and its arguments."""
    import transformers

    model_config = getattr(transformers, f"{name}Config")(**config)
    if images is None:
        return Parts(config=model_config, processor=tokenizer)
    name_of_images, arguments_of_images = images
    image_processor_class = getattr(transformers, f"{name_of_images}ImageProcessor")
    readers: dict[str, Any] = {"image_processor": image_processor_class(**arguments_of_images)}
    if videos is not None:
        name_of_videos, arguments_of_videos = videos
        video_processor_class = getattr(transformers, f"{name_of_videos}VideoProcessor")
        readers["video_processor"] = video_processor_class(**arguments_of_videos)
    processor_class: Any = getattr(transformers, f"{processor or name}Processor")
    whole = processor_class(tokenizer=tokenizer, **readers, **options or {})
    return Parts(config=model_config, processor=whole, **parts)


_MERGE = 2
_MIN_TOKENS = 4
_MAX_TOKENS = 64
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
    tokenizer = _tokenizer(tokens.QWEN_TOKENS, templates.QWEN3_VL)
    tower = _tower(deepstack_visual_indexes=[0, 1])
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
    side = 56
    per_tile = {"image_seq_length": 4}
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
    side = 56
    per_image = 4
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


def gemma4() -> Parts:
    """The form of the small models: an embedding for each layer, keys shared by the last two layers, an audio tower."""
    small = {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2}
    audio = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 32}
    audio |= {"subsampling_conv_channels": [8, 4], "dtype": "float32"}
    return _gemma4(text=small, audio_config=audio)


def gemma4_large() -> Parts:
    """The form of the large models: image tokens that see each other, values that are keys, and no audio."""
    return _gemma4(text={"use_bidirectional_attention": "vision", "attention_k_eq_v": True})


def gemma4_moe() -> Parts:
    """The large models' form with 4 experts a layer, 2 of them for each token, beside a dense layer."""
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    return _gemma4(text={"use_bidirectional_attention": "vision", "attention_k_eq_v": True, **experts})


def _gemma4(*, text: dict[str, Any], audio_config: dict[str, Any] | None = None) -> Parts:
    """At most 70 tokens an image, logits capped at 30, and layers of full attention with wider heads."""
    from transformers import Gemma4AudioFeatureExtractor

    tokenizer = tokens.gemma_tokenizer(tokens.GEMMA4_MARKS, ("<|turn>", "<turn|>"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|video|>"]})
    layers = {"num_hidden_layers": 4, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2}
    heads = {"head_dim": HEAD_DIM, "global_head_dim": 2 * HEAD_DIM}
    sizes = text_sizes(tokenizer, **layers, **heads, final_logit_softcapping=30.0, tie_word_embeddings=True)
    sizes |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": sizes["vocab_size"], **text}
    marks = {"boi_token_id": "<|image>", "eoi_token_id": "<image|>", "image_token_id": "<|image|>"}
    marks |= {"boa_token_id": "<|audio>", "eoa_token_index": "<audio|>", "audio_token_id": "<|audio|>"}
    tower = {"num_key_value_heads": 2, "head_dim": HEAD_DIM, "patch_size": 4, "position_embedding_size": 64}
    tower["default_output_length"] = 70  # read by vLLM alone
    config = {
        "text_config": sizes,
        "vision_config": _TOWER_SIZES | tower,
        "audio_config": audio_config,
        **token_ids(tokenizer, **marks, video_token_id="<|video|>"),
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    patches = {"patch_size": 4, "max_soft_tokens": 70}
    return assemble(
        "Gemma4",
        tokenizer,
        config=config,
        images=("Gemma4", patches),
        videos=("Gemma4", patches),
        options={"chat_template": templates.GEMMA4, "feature_extractor": Gemma4AudioFeatureExtractor()},
        end_tokens=("<eos>", "<turn|>"),
        # Attention has no scale but these weights: with 1, a random model would attend to single tokens.
        scaled={"q_norm.weight": 0.3, "k_norm.weight": 0.3},
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


def glm4v() -> Parts:
    """14-pixel patches, learned positions interpolated to the image's shape, and four norms a layer.

    `intermediate_size` of the tower is that of its merger alone; its blocks have `out_hidden_size` there.
    """
    ends = {"end": "<|endoftext|>", "pad": "<|endoftext|>", "unknown": None}
    tokenizer = tokens.byte_level_tokenizer(tokens.GLM_TOKENS, **ends, kind="PreTrainedTokenizerFast")
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}
    named = {"image_start_token_id": "<|begin_of_image|>", "image_end_token_id": "<|end_of_image|>"}
    named |= {"video_start_token_id": "<|begin_of_video|>", "video_end_token_id": "<|end_of_video|>"}
    named |= {"image_token_id": "<|image|>", "video_token_id": "<|video|>"}
    tower = {"depth": 2, "hidden_size": 64, "num_heads": 2, "image_size": 56, "patch_size": 14, "dtype": "float32"}
    text = text_sizes(tokenizer, tie_word_embeddings=False, rope_parameters=rope)
    text["attention_bias"] = True  # read by vLLM alone: transformers' model always has biases
    config = {
        "text_config": {"model_type": "glm4v_text", **text},
        "vision_config": tower | {"out_hidden_size": HIDDEN_SIZE, "intermediate_size": 128},
        **token_ids(tokenizer, **named),
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    of_token = (14 * _MERGE) ** 2
    # The processor counts the pixels of both temporal patches.
    size = {"shortest_edge": 2 * _MIN_TOKENS * of_token, "longest_edge": 2 * _MAX_TOKENS * of_token}
    return assemble(
        "Glm4v",
        tokenizer,
        config=config,
        images=("Glm4v", {"size": size, **_NORMALISED}),
        videos=("Glm4v", {"size": size, **_NORMALISED}),
        options={"chat_template": templates.GLM4V},
        end_tokens=("<|endoftext|>", "<|user|>", "<|observation|>"),
    )


def lfm2_vl() -> Parts:
    """An image of up to 16 tokens of 2 x 2 patches, or tiles of 4 tokens and a thumbnail if it is large."""
    ends = {"begin": "<|startoftext|>", "end": "<|im_end|>", "pad": "<|pad|>", "unknown": None}
    tokenizer = tokens.byte_level_tokenizer(tokens.LFM_TOKENS, **ends, kind="PreTrainedTokenizerFast")
    layers = {"num_hidden_layers": 2 * NUM_LAYERS, "layer_types": ["conv", "conv", "full_attention", "conv"]}
    text = text_sizes(tokenizer, tie_word_embeddings=True, block_multiple_of=32, **layers)
    config = {
        # Only vLLM reads the width of the convolutions.
        "text_config": {"model_type": "lfm2", "conv_L_cache": 3, "conv_dim": HIDDEN_SIZE, **text},
        "vision_config": _TOWER_SIZES
        | {"model_type": "siglip2_vision_model", "num_patches": 16, "patch_size": 8, "vision_use_head": False},
        **token_ids(tokenizer, image_token_id="<image>"),
        "projector_hidden_size": 96,
        "dtype": "float32",
    }
    images = {"encoder_patch_size": 8, "tile_size": 32, "min_image_tokens": 4, "max_image_tokens": 16, "max_tiles": 4}
    return assemble(
        "Lfm2Vl",
        tokenizer,
        config=config,
        images=("Lfm2Vl", images | _NORMALISED),
        options={"chat_template": templates.LFM2_VL},
        end_tokens=("<|im_end|>",),
        renamed={f"model.{name}": f"model.{published}" for name, published in _SIGLIP_NAMES.items()},
    )


FAMILIES: dict[str, Callable[[], Parts]] = {
    # With biases in the attention.
    "qwen2": lambda: _text("Qwen2", tokens.QWEN_TEXT_TOKENS, templates.QWEN2),
    # Normalises queries and keys.
    "qwen3": lambda: _text("Qwen3", tokens.QWEN_TOKENS, templates.QWEN3, head_dim=HEAD_DIM),
    "qwen2_vl": lambda: _old("Qwen2VL", embed_dim=64, hidden_size=HIDDEN_SIZE, mlp_ratio=2),
    # Windows of 2 x 2 image tokens in the tower's first block, the whole image in its second.
    "qwen2_5_vl": lambda: _old("Qwen2_5_VL", **_WINDOWS, out_hidden_size=HIDDEN_SIZE, tokens_per_second=2),
    "qwen3_vl": lambda: _new("Qwen3VL", tied=True),
    # 4 experts a layer, 2 of them for each token, and a head of its own.
    "qwen3_vl_moe": lambda: _new("Qwen3VLMoe", tied=False, transposed=_TRANSPOSED, **_EXPERTS),
    "qwen3_5": lambda: _linear("Qwen3_5"),
    "qwen3_5_moe": lambda: _linear("Qwen3_5Moe", shared_expert_intermediate_size=64, **_EXPERTS),
} | {
    build.__name__: build
    for build in (
        internvl,
        smolvlm,
        idefics3,
        gemma3,
        gemma4,
        gemma4_large,
        gemma4_moe,
        llava_onevision,
        glm4v,
        lfm2_vl,
    )
}
