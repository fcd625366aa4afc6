"""Random Qwen3-VL checkpoints and rows of known shape, for what is measured without a trained model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cepo.data.batch import ScoringRow
    from cepo.models.processing import Processing


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and the rows it is given.

    Attributes:
        text, vision: entries of the model's configuration.
        prompt: tokens of the student's prompt, those of its picture included.
        picture: (rows, columns) of image tokens.
        hint: tokens that a teacher's context has more.
        responses: (shortest, longest), spread like the quantiles of an exponential distribution.
    """

    text: dict[str, Any]
    vision: dict[str, Any]
    prompt: int
    picture: tuple[int, int]
    hint: int
    responses: tuple[int, int]


SHAPES = {
    "micro": Shape(text={}, vision={}, prompt=100, picture=(4, 4), hint=10, responses=(10, 100)),
    "small": Shape(
        text={
            "vocab_size": 16384,
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_interleaved": True,
                "mrope_section": [12, 10, 10],
            },
        },
        vision={
            "depth": 6,
            "hidden_size": 256,
            "intermediate_size": 1024,
            "out_hidden_size": 512,
            "num_position_embeddings": 48 * 48,
            "deepstack_visual_indexes": [1, 3, 5],
        },
        prompt=400,
        picture=(15, 20),
        hint=20,
        responses=(50, 800),
    ),
}
"""`micro` is the embedded world's architecture with 1.2 M parameters, `small` has about 40 M."""


def build_checkpoint(folder: Path, shape: Shape) -> Path:
    """A checkpoint with random weights, float32, with the embedded world's tokenizer and processor."""
    from cepo.models.cpu_torch import repair_this_process

    repair_this_process()
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    from cepo.microgeo.model import build_processor, model_config
    from cepo.microgeo.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    config: Any = model_config(tokenizer)
    for part, entries in ((config.text_config, shape.text), (config.vision_config, shape.vision)):
        for name, value in entries.items():
            setattr(part, name, value)
    config = type(config).from_dict(config.to_dict())
    torch.manual_seed(0)
    Qwen3VLForConditionalGeneration(config).float().save_pretrained(folder)
    build_processor(tokenizer).save_pretrained(folder)
    return folder


def response_lengths(shape: Shape, group_size: int) -> list[int]:
    """Skewed: most are short, the last is the longest."""
    import math

    shortest, longest = shape.responses
    if group_size == 1:
        return [longest]
    top = -math.log(0.5 / group_size)
    quantiles = [-math.log(1 - (number + 0.5) / group_size) / top for number in range(group_size)]
    return [round(shortest + (longest - shortest) * quantile) for quantile in quantiles]


def build_rows(
    shape: Shape, processing: Processing, *, groups: int, group_size: int, contexts: int, prompt: int
) -> list[list[ScoringRow]]:
    """For each context the rows of all groups; every group has a picture and random words of its own."""
    import torch

    from cepo.data.batch import ScoringRow
    from cepo.models.processing import EncodedPrompt, ImageInputs

    assert processing.image_token_id is not None
    draw = torch.Generator().manual_seed(1)

    def words(number: int) -> tuple[int, ...]:
        return tuple(torch.randint(256, (number,), generator=draw).tolist())

    rows: list[list[ScoringRow]] = [[] for _ in range(contexts)]
    height, width = (processing.merge_size * side for side in shape.picture)
    num_image_tokens = shape.picture[0] * shape.picture[1]
    for _ in range(groups):
        pixels = torch.randn(height * width, 3 * 2 * 16 * 16, generator=draw)
        images = ImageInputs(pixel_values=pixels, grid_thw=torch.tensor([[1, height, width]]))
        begin = (*words(10), *[processing.image_token_id] * num_image_tokens, *words(prompt - num_image_tokens - 15))
        end = words(5)
        responses = [words(length) for length in response_lengths(shape, group_size)]
        for number in range(contexts):
            ids = (*begin, *(words(shape.hint) if number else ()), *end)
            context = EncodedPrompt(token_ids=ids, engine_ids=ids, images=images)
            rows[number] += [ScoringRow(context=context, response_ids=response) for response in responses]
    return rows
