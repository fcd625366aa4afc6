"""Computes what methods share: statistics of groups, sums over time, the evidence weight, metrics.

Only tensor methods are used, so torch is imported only for annotations: reading a configuration loads all methods.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

from cepo.algorithms.settings import GroupAdvantageConfig
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
SURE_PROBABILITY = 0.9
"""Tokens of at least this probability had no alternative: their evidence is near 0, whatever its noise elsewhere."""
NORMAL_MEDIAN = 0.6745
"""Median of |x| for a standard normal x, by which the median size of noise becomes its standard deviation."""
LEAST_NOISE = 0.05
"""Noise in nats that is assumed if no token shows any, or less."""
_LARGEST_LOG_ODDS = 500.0
"""Bound of summed evidence, at which its exponential is still finite in float64."""
_DEFAULTS = GroupAdvantageConfig()


def all_rows(rewards: Float[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """Returns True for every rollout."""
    return rewards.new_ones(rewards.shape).bool()


def live_rows(rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """Returns which rollouts belong to groups whose rewards differ: `max R - min R >= 1e-6`."""
    group, _ = groups_of(group_ids)
    exact = rewards.double()
    highest = group_maxima(exact, group)
    lowest = -group_maxima(-exact, group)
    differs = (highest - lowest) >= FLAT_REWARD_RANGE  # (groups,)
    return differs[group]


def group_maxima(values: Float[Tensor, " B"], group: Int64[Tensor, " B"]) -> Float[Tensor, " groups"]:
    """Returns the highest value of each group number."""
    num_groups = int(group.max()) + 1
    return values.new_full((num_groups,), -math.inf).scatter_reduce(0, group, values, "amax")


def group_moments(
    rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"], *, ddof: int = 1
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Returns for each row, in float64, the reward minus its group's mean, the group's deviation and the group's size.

    The variance of n rewards is divided by n - `ddof`. Raises `ConfigError`: a group has a single rollout.
    """
    group, sizes = _sized_groups(group_ids)
    exact = rewards.double()
    means = group_sums(exact, group) / sizes  # (groups,)
    centred = exact - means[group]  # (B,)
    variances = group_sums(centred.square(), group) / (sizes - ddof)
    deviations = variances.sqrt()
    return centred, deviations[group], sizes[group]


def group_advantages(
    rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"], settings: GroupAdvantageConfig = _DEFAULTS
) -> Float[Tensor, " B"]:
    """Computes `A_i = (R_i - mean_g) / (std_g + 1e-6)`, exactly 0 in groups of equal rewards; statistics in float64.

    `scale: none` omits the division (Dr. GRPO); `scale: mean` divides by mean_g (MaxRL), and gives 0 in groups whose mean
    is not positive. Raises `ConfigError`: a group has a single rollout.
    """
    centred, deviation, _ = group_moments(rewards, group_ids, ddof=settings.ddof)
    mean = rewards.double() - centred
    advantages = scaled(centred, deviation, mean, settings)
    return advantages.where(live_rows(rewards, group_ids), 0.0).to(rewards.dtype)


def scaled(
    differences: Float[Tensor, " B"],
    deviation: Float[Tensor, " B"],
    mean: Float[Tensor, " B"],
    settings: GroupAdvantageConfig,
) -> Float[Tensor, " B"]:
    """Divides differences of rewards by what `advantage.scale` names: the group's deviation, its mean, or nothing."""
    if settings.scale == "std":
        return differences / (deviation + DEVIATION_FLOOR)
    if settings.scale == "mean":
        return (differences / mean).where(mean > 0, 0.0)
    return differences


def pass_rate_of_others(
    rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"], *, low: float = 0.0, high: float = 1.0
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Returns `p_i = (sum_{j != i} r_j + 1/2) / n` for each row of a group, in float64, and the group's size n.

    `r_j` is the reward mapped linearly from [`low`, `high`] to [0, 1] and clamped. p_i is never 0 or 1, and does not
    contain the row's own reward. Raises `ConfigError`: a group has a single rollout.
    """
    group, sizes = _sized_groups(group_ids)
    shares = (rewards.double() - low) / (high - low)
    shares = shares.clamp(0.0, 1.0)  # r_j
    sum_of_others = group_sums(shares, group)[group] - shares
    sizes_of_rows = sizes[group]
    return (sum_of_others + 0.5) / sizes_of_rows, sizes_of_rows


def evidence_values(prior: Float[Tensor, " B"], delta: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Computes `V_t = sigmoid(logit p + sum_{s<t} delta_s)`: prior odds times the likelihood ratio of tokens before t.

    It is float64, in the form `p / (p + (1 - p) exp(-sum))`, which is exactly p if the sum is 0. If delta is
    `log P(y_t | right answer) - log P(y_t)`, this is Bayes' rule with the policy in place of all other answers.
    """
    earlier_evidence = delta.new_zeros(delta.shape).double()  # sum_{s<t} delta_s
    earlier_evidence[:, 1:] = delta.double().cumsum(dim=1)[:, :-1]
    bounded = earlier_evidence.clamp(-_LARGEST_LOG_ODDS, _LARGEST_LOG_ODDS)
    p = prior.unsqueeze(1)  # (B, 1)
    return p / (p + (1.0 - p) * (-bounded).exp())


def had_alternative(log_correct: Float[Tensor, "B T"], log_wrong: Float[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Returns the tokens that two teachers give a probability below 0.9 on average; others say nothing about noise."""
    return (log_correct.exp() + log_wrong.exp()) / 2 < SURE_PROBABILITY


def contrast_noise(agreement: Float[Tensor, "B T"], counted: Bool[Tensor, "B T"]) -> float:
    """Returns the robust standard deviation of a contrast, in nats, from the tokens at which it contradicts the outcome.

    `agreement` is delta times the sign of the outcome: noise has either sign equally often, and what decided the outcome
    mostly has that of the outcome. Of two middle values the median is the lower one; it is at least 0.05.
    """
    contradicting = -agreement[counted & (agreement < 0)]  # |delta_t|
    if contradicting.numel() == 0:
        return LEAST_NOISE
    return max(LEAST_NOISE, float(contradicting.median()) / NORMAL_MEDIAN)


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
    value = values.double().where(response_mask, 0.0)  # V_t
    next_value = value.new_zeros(value.shape)  # V_{t+1}
    next_value[:, :-1] = value[:, 1:]
    errors = (token_rewards.double() + gamma * next_value - value).where(response_mask, 0.0)  # d_t
    advantages = discounted_sums(errors, factor=gamma * gae_lambda).where(response_mask, 0.0)
    targets = (advantages + value).where(response_mask, 0.0)
    return advantages, targets


def discounted_sums(values: Float[Tensor, "B T"], *, factor: float) -> Float[Tensor, "B T"]:
    """Computes `G_t = x_t + factor G_{t+1}`, with G = 0 after the last column."""
    sums = values.new_empty(values.shape)
    running_sum = values.new_zeros(len(values))  # (B,)
    for token in range(values.shape[1] - 1, -1, -1):
        running_sum = values[:, token] + factor * running_sum
        sums[:, token] = running_sum
    return sums


def whitened(values: Float[Tensor, "B T"], response_mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Computes `(x - mean) / sqrt(var + 1e-8)` over all response tokens (unbiased var), in float64 and 0 on padding.

    It is exactly 0 if all values are within 1e-6, because rounding must not become a signal.
    """
    exact = values.double()
    of_tokens = exact[response_mask]  # (response tokens,)
    if of_tokens.numel() < 2 or float(of_tokens.max() - of_tokens.min()) < FLAT_REWARD_RANGE:
        return exact.new_zeros(exact.shape)
    deviation = (of_tokens.var() + 1e-8).sqrt()
    return ((exact - of_tokens.mean()) / deviation).where(response_mask, 0.0)


def evidence_weight(
    delta: Float[Tensor, "B T"], sign: Float[Tensor, "B _"], *, clip_radius: float
) -> Float[Tensor, "B T"]:
    """Computes `w_t = exp(clamp(sign * delta_t, log1p(-r), log1p(r))) = clip(exp(sign * delta_t), 1 - r, 1 + r)`.

    It is finite for every finite delta, and float64, in which w - 1 keeps its precision. Degenerate cases: r = 0,
    delta = 0 and sign = 0 give exactly 1.
    """
    scaled = sign.double() * delta.double()
    return scaled.clamp(math.log1p(-clip_radius), math.log1p(clip_radius)).exp()


def clipping(delta: Float[Tensor, "B T"], sign: Float[Tensor, "B _"], *, clip_radius: float) -> Float[Tensor, "B T"]:
    """Returns which bound clips `exp(sign * delta_t)`: -1 for the lower one, 1 - r, 1 for the upper one, 1 + r, or 0.

    A weight that equals a bound is not clipped.
    """
    log_weight = sign * delta
    at_lower = log_weight < math.log1p(-clip_radius)
    at_upper = log_weight > math.log1p(clip_radius)
    return at_upper.to(delta.dtype) - at_lower.to(delta.dtype)


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


def highest_tokens(
    values: Float[Tensor, "B T"], response_mask: Bool[Tensor, "B T"], *, share: float
) -> Bool[Tensor, "B T"]:
    """Returns the tokens with the `ceil(share * length)` highest values of each response; of equals the earlier."""
    lengths = response_mask.sum(dim=1, keepdim=True)  # (B, 1)
    num_highest = (share * lengths).ceil()
    padding_last = values.masked_fill(~response_mask, -math.inf)
    descending = padding_last.argsort(dim=1, descending=True, stable=True)
    rank = descending.argsort(dim=1)  # (B, T) of each token in its response, from 0
    return (rank < num_highest) & response_mask


def response_means(values: Float[Tensor, "B T"], response_mask: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Returns the mean over each response's tokens, 0 for an empty one."""
    sums = values.where(response_mask, 0.0).sum(dim=1)
    return sums / response_mask.sum(dim=1).clamp(min=1)


def outcome_signal(batch: TokenBatch, advantages: Float[Tensor, " B"]) -> TokenSignal:
    """Returns a signal in which every token gets its rollout's advantage."""
    return TokenSignal(
        advantages=over_response(advantages, batch.response_mask),
        metrics=group_metrics(batch),
    )


def delta_metrics(
    delta: Float[Tensor, "B T"],
    advantages: Float[Tensor, " B"] | Float[Tensor, "B _"],
    response_mask: Bool[Tensor, "B T"],
    correct: Bool[Tensor, " B"],
    *,
    mixing: float,
) -> Metrics:
    """Returns metrics of the evidence over response tokens with A != 0; A is per rollout or token.

    `evidence/delta_*` are in nats. `_right` and `_wrong` follow the verifier: with a reward for format some wrong
    rollouts have A > 0.
    """
    sign = advantage_sign(advantages).reshape(len(delta), -1)
    counted = response_mask & (sign != 0)
    right = counted & correct.unsqueeze(1)
    wrong = counted & ~correct.unsqueeze(1)
    return {
        "evidence/lambda": mean_value(mixing),
        "evidence/positive_fraction": mean_of((delta > NEUTRAL_DELTA).float(), counted),
        "evidence/negative_fraction": mean_of((delta < -NEUTRAL_DELTA).float(), counted),
        "evidence/disagreement_rate": mean_of((sign * delta < -NEUTRAL_DELTA).float(), counted),
        "evidence/delta_mean_positive_advantage": mean_of(delta, response_mask & (sign > 0)),
        "evidence/delta_mean_negative_advantage": mean_of(delta, response_mask & (sign < 0)),
        "evidence/delta_mean_right": mean_of(delta, right),
        "evidence/delta_std_right": _std_of(delta, right),
        "evidence/delta_mean_wrong": mean_of(delta, wrong),
        "evidence/delta_std_wrong": _std_of(delta, wrong),
    }


def value_metrics(values: Float[Tensor, "B T"], batch: TokenBatch) -> Metrics:
    """Returns the baseline's mean value over the tokens of right rollouts, and of wrong ones."""
    is_right = batch.correct.unsqueeze(1)
    return {
        "evidence/value_mean_right": mean_of(values, batch.response_mask & is_right),
        "evidence/value_mean_wrong": mean_of(values, batch.response_mask & ~is_right),
    }


def group_metrics(batch: TokenBatch) -> Metrics:
    """Returns the fractions of groups that are all right, all wrong or mixed, and of rollouts without an advantage."""
    group, num_groups = groups_of(batch.group_ids)
    sizes = group.bincount(minlength=num_groups)
    num_right = group.bincount(weights=batch.correct.double(), minlength=num_groups)  # (groups,)
    num_all_right = int((num_right == sizes).sum())
    num_all_wrong = int((num_right == 0).sum())
    num_mixed = num_groups - num_all_right - num_all_wrong
    is_flat = ~live_rows(batch.rewards, batch.group_ids)
    return {
        "groups/all_right": fraction(num_all_right, num_groups),
        "groups/all_wrong": fraction(num_all_wrong, num_groups),
        "groups/mixed": fraction(num_mixed, num_groups),
        "groups/flat_rollouts": mean_of(is_flat.float()),
    }


def groups_of(group_ids: Int64[Tensor, " B"]) -> tuple[Tensor, int]:
    """Returns each row's group number, counted from 0 without gaps, and the number of groups."""
    unique = group_ids.unique(return_inverse=True)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    _, group = cast("tuple[Tensor, Tensor]", unique)
    return group, int(group.max()) + 1


def _sized_groups(group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each row's group number, (B,), and the sizes of the groups, (groups,) in float64."""
    group, num_groups = groups_of(group_ids)
    sizes = group.bincount(minlength=num_groups).double()
    if int(sizes.min()) < 2:
        raise ConfigError("worker.rollout.n is 1 for some prompt; group-relative advantages need at least 2 rollouts")
    return group, sizes


def group_sums(values: Float[Tensor, " B"], group: Int64[Tensor, " B"]) -> Float[Tensor, " groups"]:
    """Sums by group number, in ascending order of the values: the bits do not depend on the order of the rows."""
    num_groups = int(group.max()) + 1
    ascending = values.argsort()
    return values.new_zeros(num_groups).index_add(0, group[ascending], values[ascending])


def _std_of(values: Tensor, where: Tensor) -> Metric:
    counted = values.double()[where]
    if counted.numel() < 2:
        return mean_value(0.0, 0.0)
    return mean_value(float(counted.std()), counted.numel())
