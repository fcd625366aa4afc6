"""Value types that cross package borders, and the one legend of axis names.

Axes: `B` rollouts of a batch, `T` response tokens (right-padded), `V` vocabulary, `H` hidden size, `G` rollouts of one group.
Log-probs are natural logs in float32, of `logits / temperature` with the rollout temperature.

Torch is named in annotations only: configs and method declarations are read without importing it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cepo.metrics import Metric, Metrics

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One sampled response of a group, as the choice of references sees it.

    Attributes:
        index: place in generation order within the group, fixed before any balancing or batching.
        reward: the total reward (`overall`).
        correct: whether the verifier accepts the response.
        response_ids: the response's tokens without the end-of-turn token.
        answer: the extracted final answer, None where nothing can be extracted.
        answer_equals_ground_truth: whether the grader judges `answer` equal to the ground truth.
    """

    index: int
    reward: float
    correct: bool
    response_ids: tuple[int, ...]
    answer: str | None
    answer_equals_ground_truth: bool


@dataclass(frozen=True, kw_only=True)
class RolloutGroup:
    """All rollouts of one prompt in one step. `seed`, `step` and `prompt_id` key every random choice made for it."""

    prompt_id: str
    ground_truth: str
    rollouts: Sequence[Rollout]
    seed: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Privileged material for one teacher context: a text, or a slice of some rollout's tokens.

    Exactly one of `text` and `token_ids` is set. `source_index` is the rollout it was taken from, None for the dataset.
    """

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    source_index: int | None = None

    def __post_init__(self) -> None:
        assert (self.text is None) != (self.token_ids is None), "a reference is either a text or tokens"


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """What an estimator sees of one rollout batch. Nothing of it may be changed.

    Attributes:
        token_level_rewards: (B, T); the outcome reward stands on the last response token, 0 elsewhere.
        response_mask: (B, T); True on response tokens, end-of-turn included.
        old_log_probs: (B, T); log P_student of the sampled tokens under the weights that start the update.
        group_ids: (B,); equal for rollouts of the same prompt.
        teacher_log_probs: view -> (B, T); rows whose reference is None hold `old_log_probs`.
        correct: (B,); the verifier's verdict.
    """

    token_level_rewards: Float[Tensor, "B T"]
    response_mask: Bool[Tensor, "B T"]
    old_log_probs: Float[Tensor, "B T"]
    group_ids: Int64[Tensor, " B"]
    teacher_log_probs: Mapping[str, Float[Tensor, "B T"]]
    correct: Bool[Tensor, " B"]

    @property
    def rewards(self) -> Float[Tensor, " B"]:
        """Each rollout's outcome reward: the masked sum of its token rewards."""
        return (self.token_level_rewards * self.response_mask).sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class TokenSignal:
    """What an estimator returns.

    Attributes:
        advantages: (B, T), constant with respect to the weights, exactly 0 on padding.
        metrics: named values, each with its reduction.
        diagnostics: named (B, T) tensors for records and heat maps; nothing trains on them.
    """

    advantages: Float[Tensor, "B T"]
    metrics: Metrics = field(default_factory=dict[str, Metric])
    diagnostics: Mapping[str, Float[Tensor, "B T"]] = field(default_factory=dict[str, "Tensor"])
