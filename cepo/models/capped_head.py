"""Caps the logits of models that do so behind their LM head, such as Gemma 4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cepo.models.head import with_weight


class CappedHead(nn.Module):
    """Computes `cap * tanh(z / cap)` of the logits `z` of an LM head, which stays a part of its model.

    transformers caps the logits in the model's forward pass and not in its head; vLLM does it behind its own.
    """

    def __init__(self, head: nn.Module, cap: float) -> None:
        super().__init__()
        self.head = head
        self.cap = cap

    @property
    def weight(self) -> Any:
        """The weight (V, H) of the head."""
        return self.head.weight

    def forward(self, hidden: Float[Tensor, "*N H"]) -> Float[Tensor, "*N V"]:
        return capped(self.head(hidden), self.cap)

    def with_weight(self, weight: Float[Tensor, "V H"]) -> Callable[[Tensor], Tensor]:
        """Returns this head with another weight; see `cepo.models.head.with_weight`."""
        plain = with_weight(self.head, weight)

        def logits(hidden: Tensor) -> Tensor:
            if isinstance(plain, Tensor):
                return capped(nn.functional.linear(hidden, plain), self.cap)
            return capped(plain(hidden), self.cap)

        return logits


def capped(logits: Float[Tensor, "*N V"], cap: float) -> Float[Tensor, "*N V"]:
    """Returns `cap * tanh(logits / cap)`, which lies within -cap and cap; the logits keep their type."""
    return torch.tanh(logits / cap) * cap


def output_head(model: Any) -> Any:
    """Returns the function from the last hidden states of `model`, a Hugging Face model, to its logits.

    It is the model's LM head, or a `CappedHead` with it if the configuration has `final_logit_softcapping`.
    """
    cap: float | None = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return model.lm_head if cap is None else CappedHead(model.lm_head, cap)


def replaced_weight(head: nn.Module, weight: Float[Tensor, "V H"]) -> Tensor | Callable[[Tensor], Tensor]:
    """Returns a model's output head with another weight, for `cepo.losses.divergence`."""
    if isinstance(head, CappedHead):
        return head.with_weight(weight)
    return with_weight(head, weight)
