"""Computes what methods share: statistics of groups, sums over time, the evidence weight, metrics.

Only tensor methods are used, so torch is imported only for annotations: reading a configuration loads all methods.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

from cepo.algorithms.settings import GroupAdvantageConfig, HindsightAdvantageConfig
from cepo.errors import ConfigError
from cepo.metrics import Metric, Metrics, fraction, mean_of, mean_value
from cepo.types import TokenBatch, TokenSignal

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor

FLAT_REWARD_RANGE = 1e-6
"""Groups whose rewards differ by less have advantage exactly 0, because rounding alone could produce |A| of 0.1."""
DEVIATION_FLOOR = 1e-6
"""Added to a group's deviation before dividing by it."""
ZERO_ADVANTAGE = 1e-6
"""Advantages of smaller magnitude have sign 0."""
NEUTRAL_DELTA = 1e-3
"""Evidence of smaller magnitude counts as neither positive nor negative in the metrics."""
_LARGEST_LOG_ODDS = 500.0
"""Bound of summed evidence, at which its exponential is still finite in float64."""
_DEFAULTS = GroupAdvantageConfig()


def all_rows(rewards: Float[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """Returns True for every rollout."""
    return rewards.new_ones(rewards.shape).bool()


def live_rows(rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """Returns which rollouts belong to groups whose rewards differ: `max R - min R >= 1e-6`."""
    group, num_groups = groups_of(group_ids)
    exact = rewards.double()
    highest = exact.new_full((num_groups,), -math.inf).scatter_reduce(0, group, exact, "amax")
    lowest = exact.new_full((num_groups,), math.inf).scatter_reduce(0, group, exact, "amin")
    return ((highest - lowest) >= FLAT_REWARD_RANGE)[group]


def group_moments(
    rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"], *, ddof: int = 1
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Returns for each row, in float64, the reward minus its group's mean, the group's deviation and the group's size.

    Raises `ConfigError`: a group has a single rollout.
    """
    group, sizes = _sized_groups(group_ids)
    exact = rewards.double()
    mean = _group_sums(exact, group, len(sizes)) / sizes
    centred = exact - mean[group]
    variance = _group_sums(centred.square(), group, len(sizes)) / (sizes - ddof)
    return centred, variance.sqrt()[group], sizes[group]


def group_advantages(
    rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"], settings: GroupAdvantageConfig = _DEFAULTS
) -> Float[Tensor, " B"]:
    """Computes `A_i = (R_i - mean_g) / (std_g + 1e-6)`, exactly 0 in groups of equal rewards; statistics in float64.

    `scale: none` omits the division (Dr. GRPO). Raises `ConfigError`: a group has a single rollout.
    """
    advantages, deviation, _ = group_moments(rewards, group_ids, ddof=settings.ddof)  # R_i - mean_g
    if settings.scale == "std":
        advantages = advantages / (deviation + DEVIATION_FLOOR)
    return advantages.where(live_rows(rewards, group_ids), 0.0).to(rewards.dtype)


def pass_rate_of_others(
    rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"], *, low: float = 0.0, high: float = 1.0
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Returns `p_i = (sum_{j != i} r_j + 1/2) / n` for each row of a group, in float64, and the group's size n.

    `r_j` is the reward mapped linearly from [`low`, `high`] to [0, 1] and clamped. p_i is never 0 or 1, and does not
    contain the row's own reward. Raises `ConfigError`: a group has a single rollout.
    """
    group, sizes = _sized_groups(group_ids)
    shares = ((rewards.double() - low) / (high - low)).clamp(0.0, 1.0)
    others = _group_sums(shares, group, len(sizes))[group] - shares
    return (others + 0.5) / sizes[group], sizes[group]


def evidence_values(prior: Float[Tensor, " B"], delta: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Computes `V_t = sigmoid(logit p + sum_{s<t} delta_s)`: prior odds times the likelihood ratio of tokens before t.

    It is float64, in the form `p / (p + (1 - p) exp(-sum))`, which is exactly p if the sum is 0. If delta is
    `log P(y_t | right answer) - log P(y_t)`, this is Bayes' rule with the policy in place of all other answers.
    """
    before = delta.new_zeros(delta.shape).double()
    before[:, 1:] = delta.double().cumsum(dim=1)[:, :-1]
    odds = prior.unsqueeze(1)
    return odds / (odds + (1.0 - odds) * (-before).clamp(-_LARGEST_LOG_ODDS, _LARGEST_LOG_ODDS).exp())


def generalised_advantages(
    token_rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Computes GAE's `A_t = sum_l (gamma lambda)^l d_{t+l}` and the critic's targets `A_t + V_t`.

    `d_t = r_t + gamma V_{t+1} - V_t`, with V = 0 after the last response token. Both are float64, 0 on padding. Targets
    with lambda = 1 are the discounted returns `G_t = r_t + gamma G_{t+1}`, and so is A if V = 0 everywhere; A with
    lambda = 0 is the one-step error. Source: Schulman et al. 2016.
    """
    value = values.double().where(response_mask, 0.0)
    following = value.new_zeros(value.shape)
    following[:, :-1] = value[:, 1:]
    errors = (token_rewards.double() + gamma * following - value).where(response_mask, 0.0)
    sums, running = errors.new_empty(errors.shape), errors.new_zeros(len(errors))
    for token in range(errors.shape[1] - 1, -1, -1):
        running = errors[:, token] + gamma * gae_lambda * running
        sums[:, token] = running
    advantages = sums.where(response_mask, 0.0)
    return advantages, (advantages + value).where(response_mask, 0.0)


def one_sided_delta(batch: TokenBatch) -> Float[Tensor, "B T"]:
    """Computes `delta_t = log P_correct(y_t) - log P_student(y_t)`, with 0 on padding."""
    delta = batch.teacher_log_probs["correct"] - batch.old_log_probs
    return delta.detach().where(batch.response_mask, 0.0)


def hindsight_advantages(
    batch: TokenBatch, config: HindsightAdvantageConfig
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Computes `A_t = (R - V_t) / sigma` with V_t of `evidence_values`, and returns both, 0 on padding.

    The prior p is the pass rate of the other rollouts. R and V_t are compared on the scale of rewards, from
    `reward_low` to `reward_high`. On this scale `sigma = sqrt(p (1 - p) n / (n - ddof))`; with `scale: none` it is 1.
    With `lam` below 1 the numerator is GAE's `sum_l lam^l (V_{t+l+1} - V_{t+l})` with R for the value after the last
    token, and 0 where its sign is not that of R - p.
    """
    mask, rewards, span = batch.response_mask, batch.rewards, config.reward_high - config.reward_low
    prior, size = pass_rate_of_others(rewards, batch.group_ids, low=config.reward_low, high=config.reward_high)
    values = evidence_values(prior, one_sided_delta(batch))
    expected = config.reward_low + span * values
    advantages = rewards.double().unsqueeze(1) - expected
    if config.lam < 1:
        sign = (rewards.double() - config.reward_low - span * prior).sign().unsqueeze(1)
        advantages, _ = generalised_advantages(
            batch.token_level_rewards, expected, mask, gamma=1.0, gae_lambda=config.lam
        )
        advantages = sign * (sign * advantages).relu()
    if config.scale == "std":
        advantages = advantages / (span * (prior * (1.0 - prior) * size / (size - config.ddof)).sqrt()).unsqueeze(1)
    return advantages.to(rewards.dtype).where(mask, 0.0), values.to(rewards.dtype).where(mask, 0.0)


def whitened(values: Float[Tensor, "B T"], response_mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Computes `(x - mean) / sqrt(var + 1e-8)` over all response tokens (unbiased var), in float64 and 0 on padding.

    It is exactly 0 if all values are within 1e-6, because rounding must not become a signal.
    """
    exact = values.double()
    kept = exact[response_mask]
    if kept.numel() < 2 or float(kept.max() - kept.min()) < FLAT_REWARD_RANGE:
        return exact.new_zeros(exact.shape)
    return ((exact - kept.mean()) / (kept.var() + 1e-8).sqrt()).where(response_mask, 0.0)


def evidence_weight(
    delta: Float[Tensor, "B T"], sign: Float[Tensor, "B _"], *, clip_radius: float
) -> Float[Tensor, "B T"]:
    """Computes `w_t = exp(clamp(sign * delta_t, log1p(-r), log1p(r))) = clip(exp(sign * delta_t), 1 - r, 1 + r)`.

    It is finite for every finite delta, and float64, in which w - 1 keeps its precision. Degenerate cases: r = 0,
    delta = 0 and sign = 0 give exactly 1.
    """
    scaled = sign.double() * delta.double()
    return scaled.clamp(math.log1p(-clip_radius), math.log1p(clip_radius)).exp()


def mixed_advantages(
    advantages: Float[Tensor, "B _"], weight: Float[Tensor, "B T"], *, mixing: float
) -> Float[Tensor, "B T"]:
    """Computes `A_hat_t = A ((1 - lambda) + lambda w_t)`, in float64 and in the form `A (1 + lambda (w_t - 1))`.

    In this form lambda = 0 and w = 1 give exactly A.
    """
    return advantages.double() * (1.0 + mixing * (weight - 1.0))


def advantage_sign(advantages: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns the sign of each advantage: -1, 1, or 0 where `|A| < 1e-6`."""
    return advantages.sign().where(advantages.abs() >= ZERO_ADVANTAGE, 0.0)


def over_response(advantages: Float[Tensor, " B"], response_mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Expands each rollout's advantage to all its response tokens, with exactly 0 on padding."""
    return advantages.unsqueeze(1).expand(response_mask.shape).where(response_mask, 0.0)


def outcome_signal(batch: TokenBatch, advantages: Float[Tensor, " B"]) -> TokenSignal:
    """Returns a signal in which every token gets its rollout's advantage."""
    return TokenSignal(
        advantages=over_response(advantages, batch.response_mask),
        metrics=group_metrics(batch.rewards, batch.correct, batch.group_ids),
    )


def evidence_metrics(
    delta: Float[Tensor, "B T"],
    advantages: Float[Tensor, " B"] | Float[Tensor, "B _"],
    response_mask: Bool[Tensor, "B T"],
    correct: Bool[Tensor, " B"],
    *,
    mixing: float,
    clip_radius: float,
) -> Metrics:
    """Returns metrics of the evidence and its weights over response tokens with A != 0; A is per rollout or token.

    `evidence/delta_*` are in nats. `_right` and `_wrong` follow the verifier: with a reward for format some wrong
    rollouts have A > 0. Clip rates count tokens whose raw weight is outside [1 - r, 1 + r].
    """
    sign = advantage_sign(advantages).reshape(len(delta), -1)
    counted = response_mask & (sign != 0)
    raw, right, wrong = sign * delta, counted & correct.unsqueeze(1), counted & ~correct.unsqueeze(1)
    return {
        "evidence/lambda": mean_value(mixing),
        "evidence/positive_fraction": mean_of((delta > NEUTRAL_DELTA).float(), counted),
        "evidence/negative_fraction": mean_of((delta < -NEUTRAL_DELTA).float(), counted),
        "evidence/clip_low_rate": mean_of((raw < math.log1p(-clip_radius)).float(), counted),
        "evidence/clip_high_rate": mean_of((raw > math.log1p(clip_radius)).float(), counted),
        "evidence/disagreement_rate": mean_of((raw < -NEUTRAL_DELTA).float(), counted),
        "evidence/weight_mean": mean_of(evidence_weight(delta, sign, clip_radius=clip_radius), counted),
        "evidence/delta_mean_positive_advantage": mean_of(delta, response_mask & (sign > 0)),
        "evidence/delta_mean_negative_advantage": mean_of(delta, response_mask & (sign < 0)),
        "evidence/delta_mean_right": mean_of(delta, right),
        "evidence/delta_std_right": _std_of(delta, right),
        "evidence/delta_mean_wrong": mean_of(delta, wrong),
        "evidence/delta_std_wrong": _std_of(delta, wrong),
    }


def value_metrics(values: Float[Tensor, "B T"], batch: TokenBatch) -> Metrics:
    """Returns the baseline's mean value over the tokens of right rollouts, and of wrong ones."""
    right, mask = batch.correct.unsqueeze(1), batch.response_mask
    return {
        "evidence/value_mean_right": mean_of(values, mask & right),
        "evidence/value_mean_wrong": mean_of(values, mask & ~right),
    }


def group_metrics(rewards: Float[Tensor, " B"], correct: Bool[Tensor, " B"], group_ids: Int64[Tensor, " B"]) -> Metrics:
    """Returns the fractions of groups that are all right, all wrong or mixed, and of rollouts without an advantage."""
    group, num_groups = groups_of(group_ids)
    sizes = group.bincount(minlength=num_groups)
    right = group.bincount(weights=correct.double(), minlength=num_groups)
    all_right, all_wrong = int((right == sizes).sum()), int((right == 0).sum())
    return {
        "groups/all_right": fraction(all_right, num_groups),
        "groups/all_wrong": fraction(all_wrong, num_groups),
        "groups/mixed": fraction(num_groups - all_right - all_wrong, num_groups),
        "groups/flat_rollouts": mean_of((~live_rows(rewards, group_ids)).float()),
    }


def groups_of(group_ids: Int64[Tensor, " B"]) -> tuple[Tensor, int]:
    """Returns each row's group number, counted from 0 without gaps, and the number of groups."""
    found = group_ids.unique(return_inverse=True)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    _, group = cast("tuple[Tensor, Tensor]", found)
    return group, int(group.max()) + 1


def _sized_groups(group_ids: Tensor) -> tuple[Tensor, Tensor]:
    group, num_groups = groups_of(group_ids)
    sizes = group.bincount(minlength=num_groups).double()
    if int(sizes.min()) < 2:
        raise ConfigError("worker.rollout.n is 1 for some prompt; group-relative advantages need at least 2 rollouts")
    return group, sizes


def _group_sums(values: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Sums by group in ascending order of the values, so that the bits do not depend on the order of the rows."""
    ascending = values.argsort()
    return values.new_zeros(num_groups).index_add(0, group[ascending], values[ascending])


def _std_of(values: Tensor, where: Tensor) -> Metric:
    kept = values.double()[where]
    return mean_value(float(kept.std()), kept.numel()) if kept.numel() > 1 else mean_value(0.0, 0.0)
