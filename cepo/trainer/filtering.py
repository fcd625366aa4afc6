"""Online filtering (DAPO): groups that teach nothing are left out, and other problems are asked in their place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from cepo.config.schema import AlgorithmConfig
from cepo.errors import RewardError
from cepo.metrics import Metrics, fraction, sum_value
from cepo.trainer.rollouts import RolloutBatch

logger = logging.getLogger(__name__)


PASSES_WITHOUT_GAIN = 3
"""Passes over the data in which no group is kept, after which a step without a limit on its rounds goes on with what it has."""


def collect_batch(
    next_round: Callable[[int], RolloutBatch],
    algorithm: AlgorithmConfig,
    *,
    num_groups: int,
    max_rounds: int,
    rounds_per_pass: int,
) -> tuple[RolloutBatch, Metrics]:
    """Asks round after round until `num_groups` groups have `filter_low < mean(filter_key) < filter_high`.

    A round without any such group is no reason to stop. After `max_rounds` the batch is filled with groups that were left
    out, with a warning: they have little or no gradient, but the step counts. With `max_rounds` of 0 or less that
    happens where three passes over the data, of `rounds_per_pass` rounds each, have kept no group: others would follow for ever.

    Args:
        next_round: rollouts of the next problems; gets the number of rounds before it in this step.
    """
    kept: list[RolloutBatch] = []
    left_out: list[RolloutBatch] = []
    rounds = last_gain = 0
    while len(kept) < num_groups:
        is_enough = (
            rounds >= max_rounds if max_rounds > 0 else rounds - last_gain >= PASSES_WITHOUT_GAIN * rounds_per_pass
        )
        if is_enough and len(kept) + len(left_out) >= num_groups:
            break
        for group in next_round(rounds).split_groups():
            value = group_mean(group, algorithm.filter_key)
            is_kept = algorithm.filter_low < value < algorithm.filter_high
            (kept if is_kept else left_out).append(group)
            last_gain = rounds + 1 if is_kept else last_gain
        rounds += 1
    metrics: Metrics = {
        "filter/kept_fraction": fraction(len(kept), len(kept) + len(left_out)),
        "filter/rounds": sum_value(rounds),
        "filter/filled_groups": sum_value(max(0, num_groups - len(kept))),
    }
    if len(kept) < num_groups:
        logger.warning(
            "online filtering kept %d of %d groups in %d rounds; %d groups it left out fill the batch",
            len(kept),
            len(kept) + len(left_out),
            rounds,
            num_groups - len(kept),
        )
    return join((kept + left_out)[:num_groups]), metrics


def group_mean(group: RolloutBatch, key: str) -> float:
    """The mean of a reward field over a group.

    Raises:
        RewardError: the reward function does not return that field for every response.
    """
    missing = sum(key not in score for score in group.scores)
    if missing:
        known = sorted({name for score in group.scores for name in score})
        raise RewardError(
            f"algorithm.filter_key '{key}' is missing in {missing} of {len(group.scores)} reward results, which have: "
            f"{', '.join(known)}"
        )
    return sum(score[key] for score in group.scores) / len(group.scores)


def join(parts: Sequence[RolloutBatch]) -> RolloutBatch:
    """One batch of the parts' groups, in order; only what the reward stage fills is carried over."""
    return RolloutBatch(
        step=parts[0].step,
        problems=[problem for part in parts for problem in part.problems],
        prompts=[prompt for part in parts for prompt in part.prompts],
        generations=[generation for part in parts for generation in part.generations],
        responses=[response for part in parts for response in part.responses],
        scores=[score for part in parts for score in part.scores],
        rewards=torch.cat([part.rewards for part in parts]),
        correct=torch.cat([part.correct for part in parts]),
        num_raised=sum(part.num_raised for part in parts),
        num_timed_out=sum(part.num_timed_out for part in parts),
    )
