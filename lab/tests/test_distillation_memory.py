"""The memory of a distillation update stays far below that of whole distributions, and does not grow with the response."""

from __future__ import annotations

import pytest
import torch
from live_tensors import LiveTensors

from lab import distillation_memory

VOCABULARY, HIDDEN = 32_768, 64


def held(way: str, tokens: int) -> tuple[int, float, torch.Tensor]:
    """Peak bytes of one update, its loss, and the gradient of the embedding that is the head too."""
    module = distillation_memory.build_model(VOCABULARY, HIDDEN)
    batch, teacher = distillation_memory.build_batch(VOCABULARY, HIDDEN, tokens)
    with LiveTensors() as bytes_held:
        loss = distillation_memory.mean_divergence(way, module, batch, teacher)
        loss.backward()
    return bytes_held.peak, float(loss.detach()), module.base.lm_head.weight.grad


@pytest.mark.heavy
def test_chunks_hold_below_an_eighth_of_the_dense_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunks have 7 tokens of 512, and loss and gradient are the same."""
    # The share of a response that a chunk has at 2,048 tokens of a vocabulary of 151,936.
    monkeypatch.setattr("cepo.models.head.DIVERGENCE_CHUNK_ELEMENTS", 7 * VOCABULARY)
    chunked, loss, gradient = held("chunked", 512)
    shorter, _, _ = held("chunked", 256)
    assert chunked - shorter < 256 * VOCABULARY * 4 / 15, "256 more tokens add the layers' own activations"
    dense, dense_loss, dense_gradient = held("dense", 512)
    distributions = 512 * VOCABULARY * 4
    assert dense > 4 * distributions, "the dense update holds both models' logits and distributions"
    assert chunked < dense / 8
    assert loss == pytest.approx(dense_loss, rel=1e-5)
    assert dense_gradient.norm() > 0
    torch.testing.assert_close(gradient, dense_gradient, rtol=1e-4, atol=1e-7)
