"""Defines the measured shapes: random Qwen3-VL checkpoints, prompts of an exact length, skewed response lengths."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testing.toy_checkpoint import toy_config, toy_processor, toy_tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import Qwen2Tokenizer, Qwen3VLConfig

    from cepo.models.processing import Processing

NUM_UNUSED_IDS = 267
"""The number of ids beyond the tokenizer's last in Qwen3-VL's checkpoints, which are never sampled."""

PIXELS_PER_TOKEN_SIDE = 32
"""An image token stands for 2 x 2 patches of 16 x 16 pixels."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a model and of its work.

    Attributes:
        image: width and height in image tokens of 32 x 32 pixels.
        prompt_tokens: of the whole prompt, including those of the image and the template.
        shortest, longest: response tokens; see `response_lengths`.
    """

    name: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head_width: int
    vision_hidden: int
    vision_intermediate: int
    vision_layers: int
    vision_heads: int
    deepstack_layers: tuple[int, ...]
    image: tuple[int, int]
    prompt_tokens: int
    shortest: int
    longest: int
    group_size: int = 8

    @property
    def image_tokens(self) -> int:
        return self.image[0] * self.image[1]


MICRO = Shape(
    name="micro",
    vocabulary=500,
    hidden=128,
    intermediate=384,
    layers=4,
    heads=4,
    key_value_heads=2,
    head_width=32,
    vision_hidden=64,
    vision_intermediate=128,
    vision_layers=2,
    vision_heads=4,
    deepstack_layers=(0, 1),
    image=(2, 2),
    prompt_tokens=64,
    shortest=16,
    longest=64,
)
"""The sizes of the embedded model."""

TINY = dataclasses.replace(MICRO, name="tiny", image=(8, 8), prompt_tokens=96, shortest=32, longest=240)
"""The same model with an image of 64 tokens and responses of about 100."""

SMALL = Shape(
    name="small",
    vocabulary=10_240,
    hidden=512,
    intermediate=1536,
    layers=8,
    heads=8,
    key_value_heads=4,
    head_width=64,
    vision_hidden=256,
    vision_intermediate=1024,
    vision_layers=6,
    vision_heads=4,
    deepstack_layers=(1, 3, 5),
    image=(20, 15),
    prompt_tokens=400,
    shortest=50,
    longest=800,
)
"""42 million parameters; head, layers and vision tower in about the proportions of Qwen3-VL-2B."""

SMOLLM2_135M = dataclasses.replace(
    MICRO,
    name="smollm2-135m",
    vocabulary=49_152,
    hidden=576,
    intermediate=1536,
    layers=30,
    heads=9,
    key_value_heads=3,
    head_width=64,
    prompt_tokens=53,
    shortest=28,
    longest=40,
)
"""The language model's sizes of SmolLM2-135M, with the small tower and image of `micro`, and the lengths of
configs/real_model at its first steps."""

QWEN3_VL_2B = Shape(
    name="qwen3-vl-2b",
    vocabulary=151_936,
    hidden=2048,
    intermediate=6144,
    layers=28,
    heads=16,
    key_value_heads=8,
    head_width=128,
    vision_hidden=1024,
    vision_intermediate=4096,
    vision_layers=24,
    vision_heads=16,
    deepstack_layers=(5, 11, 17),
    image=(20, 15),
    prompt_tokens=400,
    shortest=50,
    longest=800,
)
QWEN3_VL_4B = dataclasses.replace(QWEN3_VL_2B, name="qwen3-vl-4b", hidden=2560, intermediate=9728, layers=36, heads=32)
SHAPES = {shape.name: shape for shape in (MICRO, TINY, SMALL, SMOLLM2_135M, QWEN3_VL_2B, QWEN3_VL_4B)}


def model_config(shape: Shape) -> Qwen3VLConfig:
    """Returns the configuration, with the embedded tokenizer's special ids."""
    from transformers import Qwen3VLConfig

    config: dict[str, Any] = toy_config().to_dict()
    text: dict[str, Any] = config["text_config"]
    half = shape.head_width // 2
    sections = [half - 2 * (half * 5 // 16), half * 5 // 16, half * 5 // 16]
    text |= {
        "vocab_size": max(shape.vocabulary, text["vocab_size"]),
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads,
        "head_dim": shape.head_width,
        "rope_parameters": text["rope_parameters"] | {"mrope_section": sections},
        "max_position_embeddings": max(text["max_position_embeddings"], shape.prompt_tokens + shape.longest),
    }
    text.pop("layer_types", None)
    config["vision_config"] |= {
        "depth": shape.vision_layers,
        "hidden_size": shape.vision_hidden,
        "intermediate_size": shape.vision_intermediate,
        "num_heads": shape.vision_heads,
        "out_hidden_size": shape.hidden,
        "num_position_embeddings": 48**2,
        "deepstack_visual_indexes": list(shape.deepstack_layers),
    }
    return Qwen3VLConfig(**config)


def full_length_tokenizer(shape: Shape) -> Qwen2Tokenizer:
    """Returns the embedded tokenizer, lengthened to the shape's vocabulary but for `NUM_UNUSED_IDS` at its end.

    No text is tokenised to the further tokens, but they can be sampled. Without them nearly all ids of a large vocabulary
    would be banned, which vLLM refuses.
    """
    from transformers import Qwen2Tokenizer

    tokenizer: Any = toy_tokenizer()
    num_tokens = shape.vocabulary - NUM_UNUSED_IDS
    if num_tokens <= len(tokenizer):
        return tokenizer
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    # With the special tokens in the vocabulary, they keep their ids when the tokenizer is read again.
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    for token_id in range(len(tokenizer), num_tokens):
        vocabulary[f"unwritten{token_id}"] = token_id
    special = list(dict.fromkeys(tokenizer.all_special_tokens))
    longer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[tuple(merge) for merge in model["merges"]],  # type: ignore[arg-type]  # pairs are what it reads
        unk_token=tokenizer.unk_token,
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
        additional_special_tokens=special,
        model_max_length=tokenizer.model_max_length,
        clean_up_tokenization_spaces=False,
    )
    longer.chat_template = tokenizer.chat_template
    return longer


def write_checkpoint(shape: Shape, folder: Path, *, seed: int = 0, device: str = "cpu", dtype: str = "float32") -> Path:
    """Writes a checkpoint folder with random weights, a tokenizer of its length and a processor; keeps an existing one.

    If several processes need the same checkpoint, the first one writes it. The weights are drawn on `device`; for a
    large shape this takes seconds on a GPU and minutes on a CPU.
    """
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
            _write_checkpoint(shape, folder, seed, device, dtype)
    return folder


def _write_checkpoint(shape: Shape, folder: Path, seed: int, device: str, dtype: str) -> None:
    import torch
    from transformers import GenerationConfig, Qwen3VLForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = full_length_tokenizer(shape)
    config = model_config(shape)
    devices = [torch.cuda.current_device()] if device.startswith("cuda") else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        model: Any = Qwen3VLForConditionalGeneration._from_config(config, dtype=getattr(torch, dtype))
    end_of_turn, end_of_text = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>"))
    model.generation_config = GenerationConfig(
        do_sample=True, top_k=0, pad_token_id=end_of_text, eos_token_id=[end_of_turn, end_of_text]
    )
    toy_processor(tokenizer).save_pretrained(folder)
    model.save_pretrained(folder)


def random_image(shape: Shape, seed: int) -> Image:
    """Returns a noise image with exactly the shape's number of image tokens."""
    import numpy
    from PIL import Image

    width, height = (side * PIXELS_PER_TOKEN_SIDE for side in shape.image)
    pixels = numpy.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=numpy.uint8)
    return Image.fromarray(pixels)


def prompt_text(shape: Shape, processing: Processing, seed: int) -> str:
    """Returns `<image>` and random digits, a token each, so that the templated prompt has exactly `prompt_tokens`."""
    import numpy

    fixed = len(processing.template_ids("<image>\n")) - 1 + shape.image_tokens
    digits = numpy.random.default_rng(seed).integers(0, 10, shape.prompt_tokens - fixed)
    assert len(digits) > 0, f"a prompt of {shape.prompt_tokens} tokens has no room for text beside {fixed} fixed ones"
    return "<image>\n" + "".join(map(str, digits))


def response_lengths(shape: Shape, count: int, *, seed: int) -> list[int]:
    """Draws `shortest + (longest - shortest) * u^2`, u uniform: the mean is at 1/3 of the range, the median at 1/4."""
    import numpy

    uniform = numpy.random.default_rng(seed).random(count)
    return [round(shape.shortest + (shape.longest - shape.shortest) * float(u) ** 2) for u in uniform]
