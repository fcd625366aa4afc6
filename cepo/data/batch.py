"""Defines the batches that the trainer sends to workers: rows to score and rows to learn from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeAlias

import numpy
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from cepo.files.trees import Tree
from cepo.losses.aggregation import LossDenominators
from cepo.models.interface import EncodedPrompt
from cepo.types import Distillation

OWN_VIEW = ""
"""The view of rows with the student's own prompt."""

TokenIds: TypeAlias = NDArray[numpy.int32]
"""Tokens of a response. A step can have 10**8 of them, and a Python integer takes eight times the memory."""

RowName = tuple[str, int | None]
"""A pair (view, index of the response in its step); the index is None for a row that is never looked up."""


def token_array(tokens: ArrayLike) -> TokenIds:
    return numpy.asarray(tokens, dtype=numpy.int32)


class Kept(NamedTuple):
    """What a scoring pass keeps for the update of its step: the hidden states of a view's rows."""

    view: str
    with_entropies: bool = False  # and the entropies of their distributions, by which their tokens are weighted


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoringRow:
    """A response after a context. Rows of one prompt share the context object, and with it the images."""

    context: EncodedPrompt
    response_ids: TokenIds
    prompt: int = 0  # its index in its step; one device processes all rows of a prompt, whatever their context
    row: int | None = None  # the response's index in its step
    view: str = OWN_VIEW  # the method's view that the context belongs to

    @property
    def name(self) -> RowName:
        """The key of the row's results and kept hidden states."""
        return self.view, self.row

    @property
    def num_tokens(self) -> int:
        return len(self.context.token_ids) + len(self.response_ids)


@dataclass(frozen=True, kw_only=True)
class _OfRows:
    def at(self, indices: Sequence[int]) -> Self:
        """Returns the rows at `indices`, with unchanged totals."""
        changed: Tree = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                changed[name] = value[list(indices)]
            elif isinstance(value, Distillation):
                changed[name] = dataclasses.replace(value, token_weight=value.token_weight[list(indices)])
            elif name == "rows":
                changed[name] = [value[index] for index in indices]
        return dataclasses.replace(self, **changed)


@dataclass(frozen=True, kw_only=True)
class OptimizerBatch(_OfRows):
    """The rows of one optimizer step that have a gradient, with totals over all rows of the step.

    `old_log_probs` is None if the weights at the start of this optimizer step sampled the rows and no earlier pass scored
    them: the old log-probs are then the update's own, without gradient.
    """

    rows: Sequence[ScoringRow]
    sampled_log_probs: Float[Tensor, "R T"]  # of the rollout engine
    advantages: Float[Tensor, "R T"]
    response_mask: Bool[Tensor, "R T"]
    denominators: LossDenominators  # over every row of the step, including rows without gradient
    old_log_probs: Float[Tensor, "R T"] | None = None
    reference_log_probs: Float[Tensor, "R T"] | None = None  # under the initial weights; None without a KL in the loss
    distillation: Distillation | None = None  # of these rows; None for methods whose only loss is the policy loss


@dataclass(frozen=True, kw_only=True)
class CriticBatch(_OfRows):
    """The rows of one optimizer step of the critic."""

    rows: Sequence[ScoringRow]
    old_values: Float[Tensor, "R T"]  # before the step's updates
    returns: Float[Tensor, "R T"]  # the targets of the values
    response_mask: Bool[Tensor, "R T"]
    denominators: LossDenominators  # over every row of the step on all ranks
