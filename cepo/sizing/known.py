"""The shapes of Qwen3-VL's dense models, from the sizes in their published configuration files; no file is read."""

from __future__ import annotations

from dataclasses import dataclass

from cepo.config.schema import LoraConfig
from cepo.sizing.memory import Layers, ModelShape

_VOCABULARY = 151936
_HEAD = 128
_KEYS = 8 * _HEAD
_PIXELS = 3 * 2 * 16 * 16  # of a patch: colours, two frames, 16 x 16
_PATCH_POSITIONS = 2304
_MERGED = 4  # patches merged into one token
_DEEPSTACK = 3  # layers of the tower that give features to the language model besides the last one


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    text: Layers
    vision: Layers
    tied: bool


def _sizes(
    depth: int, hidden: int, heads: int, intermediate: int, *, vision: tuple[int, int, int], tied: bool = True
) -> _Sizes:
    tower_depth, tower_hidden, tower_intermediate = vision
    return _Sizes(
        text=Layers(depth=depth, hidden=hidden, queries=heads * _HEAD, keys=_KEYS, intermediate=intermediate),
        vision=Layers(
            depth=tower_depth,
            hidden=tower_hidden,
            queries=tower_hidden,
            keys=tower_hidden,
            intermediate=tower_intermediate,
        ),
        tied=tied,
    )


_KNOWN = {
    "2B": _sizes(28, 2048, 16, 6144, vision=(24, 1024, 4096)),
    "4B": _sizes(36, 2560, 32, 9728, vision=(24, 1024, 4096)),
    "8B": _sizes(36, 4096, 32, 12288, vision=(27, 1152, 4304), tied=False),
}
SIZES = tuple(_KNOWN)
"""Names of the models: Qwen3-VL-<name>-Instruct."""


def known_shape(size: str, lora: LoraConfig) -> ModelShape:
    """Returns the shape of Qwen3-VL-`size`; under LoRA with adapters on all linear layers of the language model."""
    text, vision, tied = _KNOWN[size].text, _KNOWN[size].vision, _KNOWN[size].tied
    linear = (
        (text.hidden, text.queries),
        (text.hidden, text.keys),
        (text.hidden, text.keys),
        (text.queries, text.hidden),
        (text.hidden, text.intermediate),
        (text.hidden, text.intermediate),
        (text.intermediate, text.hidden),
    )
    block = sum(inputs * outputs for inputs, outputs in linear) + 2 * text.hidden + 2 * _HEAD
    embeddings = _VOCABULARY * text.hidden * (1 if tied else 2)
    tower_block, tower_outside = _tower(vision, text.hidden)
    tower = vision.depth * tower_block + tower_outside
    return ModelShape(
        parameters=text.depth * block + embeddings + text.hidden + tower,
        vision_parameters=tower,
        largest_block=max(block, tower_block),
        outside_blocks=embeddings + text.hidden + tower_outside,
        adapted=linear * text.depth if lora.rank else (),
        text=text,
        vision=vision,
        vocabulary=_VOCABULARY,
        patches_per_token=_MERGED,
        vision_outside_blocks=tower_outside,
        adapts_vision=False,
        text_linear=text.depth * sum(inputs * outputs for inputs, outputs in linear),
    )


def _tower(vision: Layers, out: int) -> tuple[int, int]:
    """Returns the parameters of one block, and those outside of all blocks: patches, positions, mergers."""
    width, inner = vision.hidden, vision.intermediate
    attention = (width * 3 * width + 3 * width) + (width * width + width)
    block = 4 * width + attention + (width * inner + inner) + (inner * width + width)
    merged = _MERGED * width
    merger = (merged * merged + merged) + (merged * out + out)
    patches = (_PIXELS * width + width) + _PATCH_POSITIONS * width
    return block, patches + (2 * width + merger) + _DEEPSTACK * (2 * merged + merger)
