"""The families of other makers: a vision tower, a projector and a text model with one-axis positions."""

from __future__ import annotations

from typing import Any

from tiny_checkpoints import templates, tokens
from tiny_checkpoints.parts import HEAD_DIM, IMAGE_MEAN, Parts, text_sizes, token_ids

_TOWER_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "dtype": "float32",
}
_SIGLIP_NAMES = {"vision_tower.": "vision_tower.vision_model."}
_NORMALISED: dict[str, Any] = {"image_mean": IMAGE_MEAN, "image_std": IMAGE_MEAN}


def internvl() -> Parts:
    """Tiles of 56 x 56 pixels with 4 tokens each, up to 4 by the image's shape, and a thumbnail where there are several."""
    from transformers import GotOcr2ImageProcessor, InternVLConfig, InternVLProcessor, InternVLVideoProcessor

    side, per_tile = 56, 4
    tokenizer = tokens.byte_level_tokenizer(
        tokens.INTERNVL_TOKENS,
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    )
    config = InternVLConfig(
        text_config={"model_type": "qwen2", **text_sizes(tokenizer, tie_word_embeddings=False)},
        vision_config=_TOWER_SIZES
        | {"image_size": [side, side], "patch_size": [14, 14], "attention_bias": True, "use_mean_pooling": True},
        **token_ids(tokenizer, image_token_id="<IMG_CONTEXT>"),
        image_seq_length=per_tile,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
        dtype="float32",
    )
    size = {"height": side, "width": side}
    processor = InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(size=size, crop_to_patches=True, max_patches=4, **_NORMALISED),
        tokenizer=tokenizer,
        video_processor=InternVLVideoProcessor(size=size, **_NORMALISED),
        image_seq_length=per_tile,
        chat_template=templates.INTERNVL,
    )
    return Parts(config=config, processor=processor)


def smolvlm() -> Parts:
    """An image becomes 64 pixels wide, tiles of 32 x 32 pixels with 4 tokens each, and the whole image as one more."""
    from transformers import SmolVLMConfig, SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor

    tokenizer = tokens.byte_level_tokenizer(
        tokens.SMOLVLM_TOKENS,
        begin="<|im_start|>",
        end="<end_of_utterance>",
        pad="<|im_end|>",
        kind="GPT2Tokenizer",
        named={
            "fake_image_token": "<fake_token_around_image>",
            "image_token": "<image>",
            "end_of_utterance_token": "<end_of_utterance>",
            "global_image_token": "<global-img>",
        },
    )
    config = SmolVLMConfig(**_idefics_entries(tokenizer), tie_word_embeddings=False)
    processor = SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(**_TILES, **_NORMALISED),
        tokenizer=tokenizer,
        video_processor=SmolVLMVideoProcessor(
            size={"longest_edge": 32}, max_image_size={"longest_edge": 32}, num_frames=4, fps=1, **_NORMALISED
        ),
        image_seq_len=_TOKENS_PER_TILE,
        chat_template=templates.SMOLVLM,
    )
    return Parts(config=config, processor=processor, end_tokens=("<end_of_utterance>",))


def idefics3() -> Parts:
    """The same tiles and tower as `smolvlm`, with Llama 3's special tokens."""
    from transformers import Idefics3Config, Idefics3ImageProcessor, Idefics3Processor

    tokenizer = tokens.byte_level_tokenizer(
        tokens.IDEFICS3_TOKENS,
        begin="<|begin_of_text|>",
        end="<|end_of_text|>",
        pad="<|finetune_right_pad_id|>",
        unknown=None,
        kind="PreTrainedTokenizerFast",
    )
    config = Idefics3Config(**_idefics_entries(tokenizer), tie_word_embeddings=False)
    processor = Idefics3Processor(
        image_processor=Idefics3ImageProcessor(**_TILES, **_NORMALISED),
        tokenizer=tokenizer,
        image_seq_len=_TOKENS_PER_TILE,
        chat_template=templates.IDEFICS3,
    )
    return Parts(config=config, processor=processor, end_tokens=("<end_of_utterance>", "<|end_of_text|>"))


def gemma3() -> Parts:
    """4 tokens an image that see each other, a layer that sees 32 tokens back and one that sees all."""
    from transformers import Gemma3Config, Gemma3ImageProcessor, Gemma3Processor

    side, per_image = 56, 4
    tokenizer = tokens.gemma_tokenizer()
    config = Gemma3Config(
        text_config=text_sizes(
            tokenizer,
            head_dim=HEAD_DIM,
            query_pre_attn_scalar=HEAD_DIM,
            sliding_window=32,
            layer_types=["sliding_attention", "full_attention"],
            tie_word_embeddings=True,
        ),
        vision_config=_TOWER_SIZES | {"image_size": side, "patch_size": 14, "vision_use_head": False},
        mm_tokens_per_image=per_image,
        **token_ids(
            tokenizer,
            boi_token_index="<start_of_image>",
            eoi_token_index="<end_of_image>",
            image_token_index="<image_soft_token>",
        ),
        tie_word_embeddings=True,
        dtype="float32",
    )
    processor = Gemma3Processor(
        image_processor=Gemma3ImageProcessor(size={"height": side, "width": side}, **_NORMALISED),
        tokenizer=tokenizer,
        image_seq_length=per_image,
        chat_template=templates.GEMMA3,
    )
    return Parts(config=config, processor=processor, end_tokens=("<eos>", "<end_of_turn>"), renamed=_SIGLIP_NAMES)


def llava_onevision() -> Parts:
    """The whole image as 4 tokens, then tiles of 28 x 28 pixels without their padding, with a newline behind each row."""
    from transformers import (
        LlavaOnevisionConfig,
        LlavaOnevisionImageProcessor,
        LlavaOnevisionProcessor,
        LlavaOnevisionVideoProcessor,
    )

    side = 28
    sides = [side * tiles for tiles in (1, 2, 3)]
    pinpoints = [[height, width] for height in sides for width in sides]
    tokenizer = tokens.byte_level_tokenizer(tokens.LLAVA_TOKENS)
    config = LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **text_sizes(tokenizer, tie_word_embeddings=True)},
        vision_config=_TOWER_SIZES
        | {"model_type": "siglip_vision_model", "image_size": side, "patch_size": 14, "vision_use_head": False},
        **token_ids(tokenizer, image_token_index="<image>", video_token_index="<video>"),
        image_grid_pinpoints=pinpoints,
        dtype="float32",
    )
    size = {"height": side, "width": side}
    processor = LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=pinpoints, **_NORMALISED),
        tokenizer=tokenizer,
        video_processor=LlavaOnevisionVideoProcessor(size=size, **_NORMALISED),
        num_image_tokens=4,
        vision_feature_select_strategy="full",
        chat_template=templates.LLAVA_ONEVISION,
    )
    return Parts(config=config, processor=processor, renamed=_SIGLIP_NAMES)


_TOKENS_PER_TILE = 4
_TILES: dict[str, Any] = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}


def _idefics_entries(tokenizer: Any) -> dict[str, Any]:
    """Tiles of 4 x 4 patches, of which 2 x 2 make a token, in front of a Llama."""
    text = text_sizes(tokenizer, tie_word_embeddings=False, head_dim=HEAD_DIM)
    return {
        "text_config": {"model_type": "llama", **text},
        "vision_config": _TOWER_SIZES | {"image_size": 32, "patch_size": 8},
        "scale_factor": 2,
        "pad_token_id": tokenizer.pad_token_id,
        **token_ids(tokenizer, image_token_id="<image>"),
        "dtype": "float32",
    }
