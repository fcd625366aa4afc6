"""Defines the batches that the trainer sends to workers: rows to score and rows to learn from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict, TypeVar

from jaxtyping import Bool, Float
from torch import Tensor

from cepo.losses.policy import LossDenominators
from cepo.models.inputs import EncodedPrompt
from cepo.trees import Tree
from cepo.types import DivergenceConfig

OWN_VIEW = ""
"""The view of rows with the student's own prompt."""

RowName = tuple[str, int | None]
"""A pair (view, index of the response in its step); the index is None for a row that is never looked up."""


class ScoringOptions(TypedDict, total=False):
    """The options of a scoring pass, declared once for trainer, backends and actor.

    Attributes:
        as_teacher: whether the teacher's weights are used; by default the actor's.
        as_reference: whether the initial weights are used (LoRA: those without the adapter), for a KL penalty.
        keep_states: the view whose rows' hidden states are kept until the end of the step, for an update that distils.
        temperature: replaces the rollout temperature.
        result: per token, its log-prob; the entropy of its distribution; or KL(P_student || P_reference) over the
            vocabulary, for rows whose states were kept `as_reference`. All in nats.
    """

    as_teacher: bool
    as_reference: bool
    keep_states: str | None
    temperature: float | None
    result: Literal["log_probs", "entropy", "reference_kl"]


@dataclass(frozen=True, kw_only=True)
class ScoringRow:
    """A response after a context. Rows of one prompt share the context object, and with it the images.

    Attributes:
        prompt: the prompt's index in its step; one device processes all rows of a prompt, whatever their context.
        row: the response's index in its step.
        view: the method's view that the context belongs to.
    """

    context: EncodedPrompt
    response_ids: tuple[int, ...]
    prompt: int = 0
    row: int | None = None
    view: str = OWN_VIEW

    @property
    def name(self) -> RowName:
        """The key of the row's results and kept hidden states."""
        return self.view, self.row

    @property
    def num_tokens(self) -> int:
        return len(self.context.token_ids) + len(self.response_ids)


@dataclass(frozen=True, kw_only=True)
class DistillationRows:
    """The distillation data of an optimizer batch."""

    divergence: DivergenceConfig
    token_weight: Float[Tensor, "R T"]
    """0 for a row without a teacher."""
    view: str
    """The view whose hidden states, kept from scoring, are the teacher's."""


@dataclass(frozen=True, kw_only=True)
class OptimizerBatch:
    """The rows of one optimizer step that have a gradient, with totals over all rows of the step.

    Attributes:
        denominators: totals over every row of the step, including rows without gradient.
        on_policy: whether the weights at the start of this optimizer step sampled the rows and no earlier pass scored
            them. The old log-probs are then the update's own, without gradient, and `old_log_probs` holds the rollout
            engine's for comparison.
        sampled_log_probs: of the rollout engine; None if `old_log_probs` holds them.
        reference_log_probs: under the initial weights; None without a KL in the loss.
        distillation: None for methods whose only loss is the policy loss.
    """

    rows: Sequence[ScoringRow]
    old_log_probs: Float[Tensor, "R T"]
    advantages: Float[Tensor, "R T"]
    response_mask: Bool[Tensor, "R T"]
    denominators: LossDenominators
    on_policy: bool = False
    sampled_log_probs: Float[Tensor, "R T"] | None = None
    reference_log_probs: Float[Tensor, "R T"] | None = None
    distillation: DistillationRows | None = None

    def at(self, indices: Sequence[int]) -> OptimizerBatch:
        """Returns the rows at `indices`, with unchanged totals."""
        return _at(self, indices)


@dataclass(frozen=True, kw_only=True)
class CriticBatch:
    """The rows of one optimizer step of the critic.

    `old_values` are those before the step's updates, `returns` their targets, `denominators` totals over every row of
    the step on all ranks.
    """

    rows: Sequence[ScoringRow]
    old_values: Float[Tensor, "R T"]
    returns: Float[Tensor, "R T"]
    response_mask: Bool[Tensor, "R T"]
    denominators: LossDenominators

    def at(self, indices: Sequence[int]) -> CriticBatch:
        return _at(self, indices)


_Batch = TypeVar("_Batch", OptimizerBatch, CriticBatch, DistillationRows)


def _at(batch: _Batch, indices: Sequence[int]) -> _Batch:
    changed: Tree = {}
    for name, value in ((field.name, getattr(batch, field.name)) for field in dataclasses.fields(batch)):
        if isinstance(value, Tensor):
            changed[name] = value[list(indices)]
        elif isinstance(value, DistillationRows):
            changed[name] = _at(value, indices)
        elif name == "rows":
            changed[name] = [value[index] for index in indices]
    return dataclasses.replace(batch, **changed)
