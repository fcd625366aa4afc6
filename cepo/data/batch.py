"""What travels between the trainer and the workers: rows to score, and rows to learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cepo.losses.policy import LossDenominators
from cepo.models.inputs import EncodedPrompt
from cepo.types import DivergenceConfig

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ScoringRow:
    """A response behind a context. Rows of one prompt share the context object, and with it the pictures.

    `prompt` is the prompt's place in its batch: all its rows, behind whatever context, are worked on by one device.
    `keep_state`: whether a pass that keeps states keeps this row's; an empty one stands in its place otherwise.
    """

    context: EncodedPrompt
    response_ids: tuple[int, ...]
    prompt: int = 0
    keep_state: bool = True

    @property
    def num_tokens(self) -> int:
        """Tokens of context and response."""
        return len(self.context.token_ids) + len(self.response_ids)


@dataclass(frozen=True, kw_only=True)
class DistillationRows:
    """The distillation side of an optimizer batch.

    Attributes:
        divergence: what is minimised.
        token_weight: (R, T).
        state_index: for each row its place in the pass that kept the teacher's hidden states, -1 for a row without a
            teacher.
    """

    divergence: DivergenceConfig
    token_weight: Float[Tensor, "R T"]
    state_index: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class OptimizerBatch:
    """Rows of one optimizer step: those with a gradient, and the totals that count all of them.

    Attributes:
        rows: R rows.
        old_log_probs, advantages: (R, T).
        response_mask: (R, T).
        denominators: totals over every row of the step, rows without gradient included.
        on_policy: the weights at the start of this optimizer step are those that sampled the rows, and no earlier pass has
            scored them: their old log-probs are the update's own, without gradient. `old_log_probs` then holds the rollout
            engine's, to compare with.
        reference_log_probs: (R, T) of the initial weights, None without a KL in the loss.
        reference_index: each row's place among the kept reference states, for a KL over the vocabulary in the loss.
        distillation: None for methods whose only loss is the policy loss.
    """

    rows: Sequence[ScoringRow]
    old_log_probs: Float[Tensor, "R T"]
    advantages: Float[Tensor, "R T"]
    response_mask: Bool[Tensor, "R T"]
    denominators: LossDenominators
    on_policy: bool = False
    reference_log_probs: Float[Tensor, "R T"] | None = None
    reference_index: Sequence[int] | None = None
    distillation: DistillationRows | None = None


@dataclass(frozen=True, kw_only=True)
class CriticBatch:
    """Rows of one optimizer step of the critic.

    Attributes:
        rows: R rows.
        old_values: (R, T) values before the step's updates.
        returns: (R, T) what the values should be.
        response_mask: (R, T).
        denominators: totals over every row of the step on all ranks.
    """

    rows: Sequence[ScoringRow]
    old_values: Float[Tensor, "R T"]
    returns: Float[Tensor, "R T"]
    response_mask: Bool[Tensor, "R T"]
    denominators: LossDenominators
