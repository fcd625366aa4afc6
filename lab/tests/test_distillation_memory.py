"""The memory of a distillation update stays far below that of whole distributions, and does not grow with the response."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lab import distillation_memory

VOCABULARY, HIDDEN = 32_768, 64


class HeldBytes(TorchDispatchMode):
    """Bytes of all tensors that operations made while the mode is on and that are still alive; the peak of that sum."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._live:
                    self._live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self._live.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self._live.values()))
        return result


def held(way: str, tokens: int) -> tuple[int, float, torch.Tensor]:
    """Peak bytes of one update, its loss, and the gradient of the embedding that is the head too."""
    module = distillation_memory.build_model(VOCABULARY, HIDDEN)
    batch, teacher = distillation_memory.build_batch(VOCABULARY, HIDDEN, tokens)
    with HeldBytes() as bytes_held:
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
