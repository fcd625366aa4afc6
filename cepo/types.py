"""Defines the value types that packages exchange, and the axis names of all tensors.

Axes: `B` rollouts of a batch, `T` response tokens (right-padded), `V` vocabulary, `H` hidden size, `G` rollouts of one
group. Log-probs are natural logs in float32, of `logits / temperature` with the rollout temperature.

Torch is imported for annotations only, so that configs and method declarations can be read without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from cepo.errors import ConfigError
from cepo.metrics import Metric, Metrics, fraction, max_value, mean_of, mean_value, min_value, sum_value
from cepo.sections.fields import Count, NotNegative, Positive, section

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int32, Int64
    from torch import Tensor

__all__ = [
    "Distillation",
    "DivergenceConfig",
    "ImageReference",
    "Metric",
    "Metrics",
    "PromptReference",
    "Reference",
    "Rollout",
    "RolloutGroup",
    "TextReference",
    "TokenBatch",
    "TokenReference",
    "TokenSignal",
    "fraction",
    "max_value",
    "mean_of",
    "mean_value",
    "min_value",
    "sum_value",
]


@section
class DivergenceConfig:
    """The divergence of the student from the teacher at a token. `b` is `jsd_weight`, P_T the teacher, P_S the student.

    `kind`: `forward_kl` KL(P_T || P_S), `reverse_kl` KL(P_S || P_T), `jsd` b KL(P_T || M) + (1-b) KL(P_S || M) with
    M = b P_T + (1-b) P_S. The family is not continuous at its ends: `jsd` / b tends to forward KL as b tends to 0.
    """

    kind: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """forward_kl: KL(teacher || student); reverse_kl: KL(student || teacher); jsd: Jensen-Shannon."""
    jsd_weight: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Weight of the teacher in the mixture of jsd."""
    support: Literal["full", "topk", "sampled"] = "full"
    """Vocabulary entries that are compared. full: all; topk: the most probable, with one bucket for the rest; sampled:
    the sampled token only (policy-gradient form, reverse_kl only)."""
    topk: Count = 100
    """Number of entries with support=topk."""
    topk_from: Literal["student", "teacher"] = "student"
    """Whose most probable entries support=topk takes."""
    clip: Positive | None = None
    """Upper bound, applied as clip_mode says; null: none."""
    clip_mode: Literal["token", "vocab_entry"] = "token"
    """What clip bounds: a token's divergence, or each vocabulary entry's part of it."""
    importance_clip: Positive | None = None
    """Weight each token by P_S / P_old, at most this; null: no importance weight."""
    entropy_beta: NotNegative = 0.0
    """Weight each token by exp(-entropy_beta H), H the entropy of the teacher's distribution in nats, over the mean of
    these weights in the optimizer step: sure teachers count more. 0: no such weight."""

    @model_validator(mode="after")
    def _sampled_is_reverse(self) -> Self:
        if self.support == "sampled" and self.kind != "reverse_kl":
            raise ValueError(
                f"support is sampled with kind {self.kind}; the sampled token estimates the gradient of reverse_kl alone "
                "without bias; accepted: kind reverse_kl, or support full or topk"
            )
        return self


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """One sampled response of a group, with the data by which references are chosen."""

    index: int  # position in generation order within the group, fixed before any balancing or batching
    reward: float  # the total reward (`overall`)
    correct: bool  # whether the verifier accepts the response
    response_ids: Int32[Tensor, " L"]  # without the end-of-turn token
    answer: str | None  # the extracted final answer, None if nothing can be extracted
    answer_equals_ground_truth: bool  # as the grader judges, also if `answer` is a rounding of the ground truth
    answer_value: str | None = None  # the same text for answers of equal value; None: only the spelling counts


@dataclass(frozen=True, kw_only=True)
class RolloutGroup:
    """All rollouts of one prompt in one step. `seed`, `step` and `prompt_id` determine its random choices."""

    prompt_id: str
    ground_truth: str
    rollouts: Sequence[Rollout]
    seed: int
    step: int
    solution: str | None = None  # worked, of the dataset


class Reference:
    """The difference between a teacher's context and the student's: one of the classes below."""

    def __init__(self, **fields: object) -> None:
        raise ConfigError(
            f"Reference({', '.join(fields)}) is a base class; write TextReference(text=...), TokenReference(token_ids=...), "
            "ImageReference() for the prompt without images, ImageReference(masked=...), or PromptReference()"
        )


@dataclass(frozen=True, kw_only=True)
class TextReference(Reference):
    """A text that the teacher's template places in its context.

    `max_tokens` limits it. With None it is an answer: it has the limit of the teacher's settings, and is never cut to fit
    the prompt limit, because the beginning of an answer is another answer.
    """

    text: str
    max_tokens: int | None = None
    source_index: int | None = None  # the rollout it was taken from, None for the dataset

    @property
    def is_answer(self) -> bool:
        return self.max_tokens is None


@dataclass(frozen=True, kw_only=True)
class TokenReference(Reference):
    """A slice of a rollout's tokens, whose text the teacher's template places in its context."""

    token_ids: tuple[int, ...]
    source_index: int | None = None  # the rollout it was taken from


WordedReference = TextReference | TokenReference
"""A reference that the teacher's template words."""


@dataclass(frozen=True, kw_only=True)
class ImageReference(Reference):
    """The student's own prompt without its images and videos, or with as many tokens of masked images.

    Each patch is blackened with the probability `masked`, above 0 and at most 1, by a random choice that depends on seed,
    step and prompt. With None the prompt has no images.
    """

    masked: float | None = None
    square: int | None = None  # side of the patches in pixels of the image before it is resized; None: the model's own

    def __post_init__(self) -> None:
        assert self.masked is None or 0 < self.masked <= 1, f"masked is a probability above 0, got {self.masked}"


@dataclass(frozen=True, kw_only=True)
class PromptReference(Reference):
    """The prompt of the step's next problem, or after the last of its first, with its own images and no reference.

    The teacher reads it in place of the student's prompt. A step with one problem has no such reference.
    """


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """The data of one rollout batch that an estimator reads and must not change.

    Mappings are by view. For rows whose teacher reads no reference, the view is the student's own.
    """

    token_level_rewards: Float[Tensor, "B T"]  # the outcome reward is at the last response token, 0 elsewhere
    response_mask: Bool[Tensor, "B T"]  # True on response tokens, end-of-turn included
    old_log_probs: Float[Tensor, "B T"]  # log P_student of the sampled tokens under the weights that start the update
    group_ids: Int64[Tensor, " B"]  # equal for rollouts of the same prompt
    teacher_log_probs: Mapping[str, Float[Tensor, "B T"]]  # rows without a reference hold `old_log_probs`
    correct: Bool[Tensor, " B"]  # the verifier's verdict
    has_reference: Mapping[str, Bool[Tensor, " B"]] = field(default_factory=dict[str, "Tensor"])
    reward_baselines: Float[Tensor, " B"] | None = None  # of the prompt's greedy response, for methods that read them
    values: Float[Tensor, "B T"] | None = None  # the critic's before each token, for methods that read them

    @property
    def rewards(self) -> Float[Tensor, " B"]:
        """Each rollout's outcome reward: the masked sum of its token rewards."""
        return (self.token_level_rewards * self.response_mask).sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """A divergence from the teacher `view` that the update minimises instead of or in addition to the policy loss.

    The loss is `sum(token_weight * divergence * aggregation weight)`; its denominators count masked rows too. The
    weight is 0 on padding and on rows without a reference. The teacher's hidden states are those kept from scoring.
    """

    view: str
    divergence: DivergenceConfig
    token_weight: Float[Tensor, "B T"]


@dataclass(frozen=True, kw_only=True)
class TokenSignal:
    """The result of an estimator: advantages, metrics and, for some methods, further losses.

    `diagnostics` are tensors of shape (B, T) for records and pages; they do not affect training. The pages know `delta`
    (evidence in nats), `weight` (the factor of the advantage), `clipping` (-1 or 1 where the lower or the upper bound clips
    the weight, else 0) and `value` (the probability of a right answer before the token).
    """

    advantages: Float[Tensor, "B T"]  # constant with respect to the weights, exactly 0 on padding
    metrics: Metrics = field(default_factory=dict[str, Metric])
    diagnostics: Mapping[str, Float[Tensor, "B T"]] = field(default_factory=dict[str, "Tensor"])
    distillation: Distillation | None = None  # None for methods whose only loss is the policy loss
    returns: Float[Tensor, "B T"] | None = None  # the critic's targets, 0 on padding; None for methods without one
