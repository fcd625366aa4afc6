"""A frozen base in 4 bits under a trained adapter (QLoRA, arXiv 2305.14314), by bitsandbytes through transformers' own switch."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cepo.config.checks import INSTALL_BITSANDBYTES
from cepo.config.schema import LoraConfig
from cepo.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import BitsAndBytesConfig

    from cepo.models.families import Family

QUANTIZATION_CONFIG = "quantization_config.json"
"""Beside an adapter that was trained on a base in 4 bits: the arguments of transformers' `BitsAndBytesConfig`."""

logger = logging.getLogger(__name__)
# Imported by PEFT wherever it is installed, it regrets the want of a kernel that is not used here; see `prepare_quantised`.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def quantization_of(lora: LoraConfig, *, dtype: torch.dtype) -> BitsAndBytesConfig | None:
    """What transformers is to load the base with; None where the base keeps its type. Products are computed in `dtype`."""
    from transformers import BitsAndBytesConfig

    if lora.quantization is None:
        return None
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=lora.quantization,
        bnb_4bit_use_double_quant=lora.double_quantization,
        bnb_4bit_compute_dtype=dtype,
    )


def kept_modules(family: Family) -> list[str]:
    """The modules that keep their type: the output head, and all that images' features depend on.

    Embeddings are no linear layers, a tied head is the embeddings, and every token passes the head at last, where an error
    is added to all logits. The vision tower is a small share of the weights; its features are computed once per image.
    """
    return ["lm_head", *(f"model.{name}" for name in family.vision_modules)]


def prepare_quantised(model: Any) -> None:
    """Makes the 4-bit layers of a loaded model compute alike with and without gradient, and leaves them out of state dicts.

    On a CPU with AVX512-BF16 bitsandbytes would repack a weight at the first pass without gradient, for a kernel that
    rounds activations to bf16 and has no backward pass. What is in a layer beside its weight (scales, the code of the
    4-bit type) is written by no checkpoint: the base is quantised anew where it is loaded.
    """
    layers = dict(_quantised_layers(model))
    for layer in layers.values():
        layer.support_avx512bf16_for_cpu = False
        layer.register_state_dict_post_hook(_without_scales)
    weights = sum(layer.in_features * layer.out_features for layer in layers.values())
    rest = sum(weight.numel() for weight in model.parameters() if not is_quantised(weight))
    logger.info("%d linear layers with %d weights are in 4 bits, %d weights are not", len(layers), weights, rest)


def is_quantised(weight: Any) -> bool:
    """Whether the parameter holds packed 4-bit numbers, which no sharding can cut and no adapter's norm can read."""
    return getattr(weight, "quant_state", None) is not None


def quantised_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """The packed weights by name."""
    return {name: weight for name, weight in module.named_parameters() if is_quantised(weight)}


def dequantised(weight: Any) -> Tensor:
    """The packed weight as (out, in), in the type of the computation: the numbers that a pass multiplies with."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, weight.quant_state)


def write_quantization(model: Any, folder: Path) -> None:
    """Writes how the base of an adapter was quantised beside it; nothing where it was not."""
    settings = getattr(model.config, "quantization_config", None)
    if settings is not None:
        text = json.dumps(settings.to_dict(), indent=2, default=str)
        (folder / QUANTIZATION_CONFIG).write_text(text + "\n", encoding="utf-8")


def read_quantization(folder: Path) -> BitsAndBytesConfig | None:
    """What `write_quantization` wrote; None where nothing was.

    Raises:
        CheckpointError: the file cannot be read as such settings, or bitsandbytes is not installed.
    """
    path = folder / QUANTIZATION_CONFIG
    if not path.is_file():
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        raise CheckpointError(
            f"{folder} was trained on a base in 4 bits, which takes bitsandbytes to make again: {INSTALL_BITSANDBYTES}"
        )
    from transformers import BitsAndBytesConfig

    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        return BitsAndBytesConfig.from_dict(settings)  # pyright: ignore[reportReturnType]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read as settings of a 4-bit base: {error}") from error


def _quantised_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, layer) for name, layer in model.named_modules() if is_quantised(getattr(layer, "weight", None)))


def _without_scales(layer: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}weight.")]:
        del state[name]
