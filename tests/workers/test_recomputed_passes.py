"""A pass and its recomputation, with packed attention as on a card: kernels are formulas here, and all else is its own."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from actors import build_actor
from torch import Tensor

from cepo.errors import EngineError
from cepo.models import segments
from cepo.models.processing import Processing
from testing.attention import attend_by_formula_to_mask
from testing.rows import build_rows, gradients_of, optimizer_batch
from testing.shapes import MICRO, write_checkpoint

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def micro_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(MICRO, tmp_path_factory.mktemp("micro") / "model", dtype="float32")


@pytest.mark.parametrize("recomputes", ["true", "false"])
def test_an_update_may_be_the_first_pass_of_a_process(
    micro_folder: Path, recomputes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is tried out within the pass: torch compares what it saved with what the recomputation saves.

    The trial of both directions of attention was once a part of the first pass. An update without scoring before it
    then ended with a `CheckpointError`: 74 tensors saved in the pass, 68 in the recomputation.
    """
    folder = micro_folder
    rows, _ = build_rows(MICRO, Processing(str(folder)), groups=2, group_size=2, contexts=2, prompt=MICRO.prompt_tokens)
    batch = optimizer_batch(rows)
    settings = {"model__lora__rank": 4, "model__enable_gradient_checkpointing": recomputes}
    expected = gradients_of(build_actor(folder, **settings), batch)

    monkeypatch.setattr(segments, "compiled", lambda backend: attend_by_formula_to_mask)
    monkeypatch.setattr(segments, "attend_by_parts", segments.attend_by_blocks)
    actor = build_actor(folder, **settings)
    segments.require_packed_attention(actor.module.base.get_decoder(), actor.device, torch.float32)
    for gradient, expected_gradient in zip(gradients_of(actor, batch), expected, strict=True):
        assert float((gradient - expected_gradient).norm()) <= 1e-4 * float(expected_gradient.norm() + 1e-6)


def test_attention_is_tried_out_for_the_sizes_of_the_decoder(
    micro_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first pass, with the heads and the scale of the layers themselves."""
    tried: list[tuple[object, ...]] = []
    monkeypatch.setattr(segments, "_require_gradients", lambda *sizes: tried.append(sizes))
    actor = build_actor(micro_folder)
    segments.require_packed_attention(actor.module.base.get_decoder(), actor.device, torch.bfloat16)
    heads = (MICRO.heads, MICRO.key_value_heads, MICRO.head_width, MICRO.head_width**-0.5)
    assert set(tried) == {(actor.device, torch.bfloat16, *heads)}


def test_attention_of_other_gradients_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 took the blocks of a transposed table for those of a key: outputs were right, and gradients grew layer by layer."""

    def with_keys_gradient_of_others(query: Tensor, key: Tensor, *arguments: Any) -> Tensor:
        return attend_by_formula_to_mask(query, 2 * key - key.detach(), *arguments)

    sizes = (torch.device("cpu"), torch.float32, 4, 2, 32, 32**-0.5)
    for computes, is_right in ((attend_by_formula_to_mask, True), (with_keys_gradient_of_others, False)):
        segments._require_gradients.cache_clear()
        monkeypatch.setattr(segments, "compiled", lambda backend, computes=computes: computes)
        with (
            contextlib.nullcontext()
            if is_right
            else pytest.raises(EngineError, match=r"gradient of the key differs by .*padding_free=false")
        ):
            segments._require_gradients(*sizes)
    segments._require_gradients.cache_clear()
