"""The settings of a base in 4 bits, from the configuration to bitsandbytes, and through the file beside an adapter."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch

from cepo.config.worker_schema import LoraConfig
from cepo.models.pretrained import quantization_of, read_quantization, write_quantization


def test_without_4_bits_there_are_no_settings() -> None:
    assert quantization_of(LoraConfig(rank=4), dtype=torch.float32) is None


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("is_double", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_setting_reaches_bitsandbytes_and_the_file(
    kind: Literal["nf4", "fp4"], is_double: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """A base of other scales has other weights, on which the adapter was not trained."""
    lora = LoraConfig(rank=4, quantization=kind, double_quantization=is_double)
    settings = quantization_of(lora, dtype=dtype)
    write_quantization(SimpleNamespace(config=SimpleNamespace(quantization_config=settings)), tmp_path)
    for quantization in (settings, read_quantization(tmp_path)):
        assert quantization is not None
        assert quantization.load_in_4bit is True
        assert quantization.bnb_4bit_quant_type == kind
        assert quantization.bnb_4bit_use_double_quant is is_double
        assert quantization.bnb_4bit_compute_dtype is dtype
