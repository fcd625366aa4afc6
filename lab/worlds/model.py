"""Builds the embedded model, a `Qwen3VLForConditionalGeneration` checkpoint with 1.3 million parameters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cepo.microgeo.figures import IMAGE_SIDE, MERGE_SIZE, PATCH_SIZE
from lab.worlds.kinds import SHAPES, TaughtWorld
from lab.worlds.tokenizer import build_tokenizer

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLProcessor

MAX_POSITIONS = 4096
_PIXELS_PER_TOKEN = (PATCH_SIZE * MERGE_SIZE) ** 2
_MIN_IMAGE_TOKENS = 4
_MAX_IMAGE_TOKENS = 700


def build_untrained_model(folder: Path, *, kind: TaughtWorld = SHAPES, seed: int = 0) -> Path:
    """Writes a checkpoint folder with random weights, the tokenizer, the processor and the generation config.

    transformers and vLLM can read the folder. The same seed gives the same files.
    """
    import torch
    from transformers import GenerationConfig, Qwen3VLForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(kind)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(model_config(tokenizer)).float()
    end_of_turn, end_of_text = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>"))
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        pad_token_id=end_of_text,
        eos_token_id=[end_of_turn, end_of_text],
    )
    model.save_pretrained(folder)
    build_processor(tokenizer).save_pretrained(folder)
    return folder


def model_config(tokenizer: Qwen2Tokenizer) -> Qwen3VLConfig:
    """Returns the model's configuration, with the tokenizer's size and special ids."""
    from transformers import Qwen3VLConfig

    def token_id(token: str) -> int:
        return tokenizer.convert_tokens_to_ids(token)  # type: ignore[return-value]

    text_config: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_interleaved": True,
            "mrope_section": [6, 5, 5],
        },
        "pad_token_id": token_id("<|endoftext|>"),
        "eos_token_id": token_id("<|im_end|>"),
        "bos_token_id": None,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    vision_config: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": PATCH_SIZE,
        "spatial_merge_size": MERGE_SIZE,
        "temporal_patch_size": 2,
        "out_hidden_size": 128,
        "num_position_embeddings": (IMAGE_SIDE // PATCH_SIZE) ** 2,
        "deepstack_visual_indexes": [0, 1],
        "dtype": "float32",
    }
    return Qwen3VLConfig(
        text_config=text_config,
        vision_config=vision_config,
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=True,
        dtype="float32",
    )


def build_processor(tokenizer: Qwen2Tokenizer) -> Qwen3VLProcessor:
    """Builds the processor from the tokenizer: a 64x64 image becomes 4 image tokens, and no image more than 700."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    geometry: dict[str, Any] = {"patch_size": PATCH_SIZE, "merge_size": MERGE_SIZE, "temporal_patch_size": 2}
    half = [0.5, 0.5, 0.5]
    images = Qwen2VLImageProcessor(
        min_pixels=_MIN_IMAGE_TOKENS * _PIXELS_PER_TOKEN,
        max_pixels=_MAX_IMAGE_TOKENS * _PIXELS_PER_TOKEN,
        image_mean=half,
        image_std=half,
        **geometry,
    )
    videos = Qwen3VLVideoProcessor(image_mean=half, image_std=half, cap_pixels_per_frame=True, **geometry)
    return Qwen3VLProcessor(
        image_processor=images, tokenizer=tokenizer, video_processor=videos, chat_template=tokenizer.chat_template
    )
