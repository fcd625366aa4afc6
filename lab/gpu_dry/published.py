"""Writes checkpoint folders of InternVL and SmolVLM without weights, with the sizes of published models.

Processor and tokenizer are those of the tests' tiny checkpoints, with the tokenizer lengthened to the model's vocabulary.
The sizes follow the models' `config.json`; images are cut into tiles as the models' own processors cut them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

TEXT_OF_INTERNVL = {
    "vocab_size": 151_674,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
}
TOWER_OF_INTERNVL = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": [448, 448],
}
TEXT_OF_SMOLVLM = {
    "vocab_size": 49_280,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 64,
}
TOWER_OF_SMOLVLM = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}


class Published(NamedTuple):
    """A model of another family than Qwen-VL.

    Attributes:
        family: of the tests' tiny checkpoint.
        entries: of the whole configuration that differ from the tiny checkpoint's.
        tokens_per_tile: that an image's tile becomes.
        picture: width and height in pixels of an image of several tiles.
        tile: the side of a tile in pixels.
    """

    family: str
    text: dict[str, Any]
    tower: dict[str, Any]
    entries: dict[str, Any]
    tokens_per_tile: int
    picture: tuple[int, int]
    tile: int

    def image(self) -> Image.Image:
        """Returns a grey image, which becomes two tiles and a thumbnail (InternVL) or 4 x 2 tiles and one (SmolVLM)."""
        return Image.new("RGB", self.picture, "grey")


PUBLISHED = {
    "internvl3-2b": Published(
        family="internvl",
        text=TEXT_OF_INTERNVL,
        tower=TOWER_OF_INTERNVL,
        entries={"image_seq_length": 256},
        tokens_per_tile=256,
        picture=(896, 448),
        tile=448,
    ),
    "smolvlm2-2.2b": Published(
        family="smolvlm",
        text=TEXT_OF_SMOLVLM,
        tower=TOWER_OF_SMOLVLM,
        entries={"scale_factor": 3},
        tokens_per_tile=81,
        picture=(1536, 768),
        tile=384,
    ),
}


def write_published(name: str, folder: Path) -> None:
    """Writes configuration and processor of a model of `PUBLISHED`."""
    from tiny_checkpoints.families import FAMILIES  # pyright: ignore[reportMissingImports]  # in tests/

    model = PUBLISHED[name]
    parts = FAMILIES[model.family]()
    entries = parts.config.to_dict() | model.entries
    entries["text_config"] |= model.text
    entries["text_config"].pop("layer_types", None)  # one entry for each of the tiny model's layers
    entries["vision_config"] |= model.tower
    config = type(parts.config).from_dict(entries)
    config.architectures = [type(parts.config).__name__.replace("Config", "ForConditionalGeneration")]
    config.save_pretrained(folder)
    _use_tiles(parts.processor, model)
    parts.processor.save_pretrained(folder)
    _lengthen_tokenizer(folder / "tokenizer.json", model.text["vocab_size"])


def _lengthen_tokenizer(file: Path, num_tokens: int) -> None:
    """Adds tokens to which no text is tokenised: ids without one are banned, and vLLM refuses to ban thousands."""
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    # With the special tokens in the vocabulary, they keep their ids when the tokenizer is read.
    for token in tokenizer["added_tokens"]:
        vocabulary[token["content"]] = token["id"]
    for token_id in range(max(vocabulary.values()) + 1, num_tokens):
        vocabulary[f"unwritten{token_id}"] = token_id
    file.write_text(json.dumps(tokenizer), encoding="utf-8")


def _use_tiles(processor: Any, model: Published) -> None:
    """Gives a tiny checkpoint's processor the published size of tiles and number of tokens."""
    images = processor.image_processor
    if model.family == "internvl":
        processor.image_seq_length = model.tokens_per_tile
        images.size = {"height": model.tile, "width": model.tile}
        images.max_patches = 12
        return
    processor.image_seq_len = model.tokens_per_tile
    images.size = {"longest_edge": 4 * model.tile}
    images.max_image_size = {"longest_edge": model.tile}
