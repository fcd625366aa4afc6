"""What a checkpoint folder is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
    """

    config: Any
    processor: Any
    end_tokens: tuple[str, ...] = ("<|im_end|>", "<|endoftext|>")
    transposed: tuple[str, ...] = ()
    renamed: dict[str, str] = field(default_factory=dict)


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

    made = getattr(transformers, f"{name}Config")(**config)
    if images is None:
        return Parts(config=made, processor=tokenizer)
    of_kinds = {"image_processor": ("ImageProcessor", images), "video_processor": ("VideoProcessor", videos)}
    readers = {
        kind: getattr(transformers, given[0] + end)(**given[1]) for kind, (end, given) in of_kinds.items() if given
    }
    whole: Any = getattr(transformers, f"{processor or name}Processor")
    return Parts(config=made, processor=whole(tokenizer=tokenizer, **readers, **options or {}), **parts)
