"""Supports QLoRA, a trained adapter on a frozen 4-bit base (arXiv 2305.14314), with bitsandbytes in transformers."""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cepo.config.checks import INSTALL_BITSANDBYTES
from cepo.config.worker_schema import LoraConfig
from cepo.errors import CheckpointError
from cepo.foreign_files import read_json

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig

QUANTIZATION_CONFIG = "quantization_config.json"
"""The file stored with an adapter for a 4-bit base, with the arguments of transformers' `BitsAndBytesConfig`."""

logger = logging.getLogger(__name__)
# PEFT imports bitsandbytes if installed, which warns of a missing kernel that is not used here (`prepare_quantised`).
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def quantization_of(lora: LoraConfig, *, dtype: torch.dtype) -> BitsAndBytesConfig | None:
    from transformers import BitsAndBytesConfig

    if lora.quantization is None:
        return None
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=lora.quantization,
        bnb_4bit_use_double_quant=lora.double_quantization,
        bnb_4bit_compute_dtype=dtype,
    )


def prepare_quantised(model: Any) -> None:
    """Makes 4-bit layers compute the same with and without gradient, and removes their scales from state dicts.

    On a CPU with AVX512-BF16, bitsandbytes would repack a weight in the first pass without gradient, for a kernel that
    rounds activations to bf16 and has no backward pass. Scales are not saved, because the base is quantised again.
    """
    layers = [layer for layer in model.modules() if is_quantised(getattr(layer, "weight", None))]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False
        layer.register_state_dict_post_hook(_without_scales)
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    rest = sum(weight.numel() for weight in model.parameters() if not is_quantised(weight))
    logger.info("%d linear layers with %d weights are stored in 4 bits, %d weights are not", len(layers), weights, rest)


def is_quantised(weight: object) -> bool:
    return getattr(weight, "quant_state", None) is not None  # only bitsandbytes' parameters have it


def quantised_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in module.named_parameters() if is_quantised(weight)}


def dequantised(weight: Any) -> Tensor:
    """Returns the packed weight as (out, in) in the compute type, with the values that a forward pass uses."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, weight.quant_state)


def write_quantization(model: Any, folder: Path) -> None:
    """Writes the base's quantisation settings, if it is quantised, to its adapter's folder."""
    settings = getattr(model.config, "quantization_config", None)  # only quantised models have it
    if settings is not None:
        text = json.dumps(settings.to_dict(), indent=2, default=str)
        (folder / QUANTIZATION_CONFIG).write_text(text + "\n", encoding="utf-8")


def read_quantization(folder: Path) -> BitsAndBytesConfig | None:
    """Reads what `write_quantization` has written; None if there is nothing."""
    path = folder / QUANTIZATION_CONFIG
    if not path.exists():
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        raise CheckpointError(
            f"{folder} was trained on a base in 4 bits, and needs bitsandbytes to load it: {INSTALL_BITSANDBYTES}"
        )
    from transformers import BitsAndBytesConfig

    try:
        settings = read_json(path, dict, within=folder)
        return BitsAndBytesConfig.from_dict(settings)  # pyright: ignore[reportReturnType]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read as settings of a 4-bit base: {error}") from error


def _without_scales(layer: nn.Module, state: dict[str, object], prefix: str, _: object) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}weight.")]:
        del state[name]
