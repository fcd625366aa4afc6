"""Implements hindsight: a baseline that follows what a teacher with the right answer makes of the tokens so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cepo.algorithms import statistics
from cepo.algorithms.base import Estimator
from cepo.algorithms.references import positive_references
from cepo.algorithms.registry import register_estimator
from cepo.algorithms.settings import HindsightAdvantageConfig, PositiveConfig, TeacherConfig
from cepo.sections.fields import section
from cepo.types import Reference, RolloutGroup, TokenBatch, TokenSignal

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@register_estimator("hindsight")
class Hindsight(Estimator):
    """Gives each token the reward minus what the evidence so far says of it.

        delta_t = log P_correct(y_t) - log P_student(y_t)
        V_t     = sigmoid(logit p + sum_{s<t} delta_s)
        A_t     = (R - V_t) / sigma

    p is the pass rate of the other rollouts, sigma the deviation of a reward with that rate. V_t reads nothing after the
    prefix, so the gradient is that of the expected reward, times the mean of 1 / sigma. Degenerate cases: V_t is p
    without a reference or with equal teachers. Source: lab/notes/hindsight.md; the ratio is from RLSD (Yang et al. 2026), the
    unbiasedness from Williams 1992.
    """

    @section
    class Config:
        advantage: HindsightAdvantageConfig = HindsightAdvantageConfig()
        positive: PositiveConfig = PositiveConfig()
        teacher: TeacherConfig = TeacherConfig()

    config: Config
    views = ("correct",)
    reads = ("group_ids", "old_log_probs")

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        """Returns the right answer, never from the rollout itself: its baseline must not know how the response ends."""
        positive = replace(self.config.positive, exclude_self=True)
        return {"correct": positive_references(group, positive)}

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        advantages, values = hindsight_advantages(batch, self.config.advantage)
        metrics = statistics.group_metrics(batch)
        return TokenSignal(
            advantages=advantages,
            metrics=metrics | statistics.value_metrics(values, batch),
            diagnostics={"delta": evidence_of_right_answer(batch), "value": values},
        )


def hindsight_advantages(
    batch: TokenBatch, config: HindsightAdvantageConfig
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Computes `A_t = (R - V_t) / sigma` with V_t of `statistics.evidence_values`, and returns both, 0 on padding.

    The prior p is the pass rate of the other rollouts. R and V_t are compared on the scale of rewards, from
    `reward_low` to `reward_high`. On this scale `sigma = sqrt(p (1 - p) n / (n - ddof))`; with `scale: none` it is 1, and
    with `scale: mean` the expected reward `reward_low + (reward_high - reward_low) p`. With `lam` below 1 the numerator is
    GAE's `sum_l lam^l (V_{t+l+1} - V_{t+l})` with R for the value after the last token, and 0 where its sign is not that
    of R - p. With `state_weight: uncertainty` each advantage is multiplied by `V_t (1 - V_t) / (p (1 - p))`, which is 1
    where the evidence so far says nothing, and at most `1 / (4 p (1 - p))` (OPPO, arXiv 2605.21851).
    """
    mask = batch.response_mask
    dtype = batch.rewards.dtype
    rewards = batch.rewards.double()
    low = config.reward_low
    span = config.reward_high - low
    prior, size = statistics.pass_rate_of_others(batch.rewards, batch.group_ids, low=low, high=config.reward_high)
    mean = low + span * prior  # p on the scale of rewards
    values = statistics.evidence_values(prior, evidence_of_right_answer(batch))  # (B, T) V_t as a probability
    expected = low + span * values  # V_t on the scale of rewards
    if config.lam < 1:
        advantages, _ = statistics.generalised_advantages(
            batch.token_level_rewards, expected, mask, gamma=1.0, gae_lambda=config.lam
        )
        outcome_sign = (rewards - low - span * prior).sign().unsqueeze(1)  # (B, 1) that of R - p
        advantages = outcome_sign * (outcome_sign * advantages).relu()
    else:
        advantages = rewards.unsqueeze(1) - expected
    if config.state_weight == "uncertainty":
        advantages = advantages * values * (1.0 - values) / (prior * (1.0 - prior)).unsqueeze(1)
    if config.scale == "std":
        variance = prior * (1.0 - prior) * size / (size - config.ddof)
        deviation = span * variance.sqrt()  # (B,) sigma
        advantages = advantages / deviation.unsqueeze(1)
    elif config.scale == "mean":
        mean_of_row = mean.unsqueeze(1)  # (B, 1)
        advantages = (advantages / mean_of_row).where(mean_of_row > 0, 0.0)
    return advantages.to(dtype).where(mask, 0.0), values.to(dtype).where(mask, 0.0)


def evidence_of_right_answer(batch: TokenBatch) -> Float[Tensor, "B T"]:
    """Computes `delta_t = log P_correct(y_t) - log P_student(y_t)`, with 0 on padding."""
    delta = batch.teacher_log_probs["correct"] - batch.old_log_probs
    return delta.detach().where(batch.response_mask, 0.0)
