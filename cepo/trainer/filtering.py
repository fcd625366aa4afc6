"""Implements online filtering (DAPO): drops groups without a learning signal and samples other problems instead."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

import torch

from cepo.config.schema import AlgorithmConfig
from cepo.errors import RewardError
from cepo.metrics import Metrics, fraction, sum_value
from cepo.trainer.asking import Rollouts

logger = logging.getLogger(__name__)


PASSES_WITHOUT_GAIN = 3
"""Number of passes over the data without a kept group after which filtering without `max_rounds` gives up."""


def ask_until_enough(
    next_round: Callable[[int], Rollouts],
    algorithm: AlgorithmConfig,
    *,
    num_groups: int,
    max_rounds: int,
    rounds_per_pass: int,
) -> Rollouts:
    """Samples rounds of problems until `num_groups` groups have `filter_low < mean(filter_key) < filter_high`.

    A round may yield no such group. After `max_rounds` rounds a warning is logged and dropped groups fill the batch:
    they have little or no gradient, but the step counts. If `max_rounds` is 0 or less, this happens after three passes
    over the data, of `rounds_per_pass` rounds each, without a kept group; otherwise the loop might never end.

    Args:
        next_round: returns rollouts of the next problems, given the number of earlier rounds in this step.
    """
    kept: list[Rollouts] = []
    left_out: list[Rollouts] = []
    rounds = last_gain = num_raised = num_timed_out = 0
    while len(kept) < num_groups:
        is_enough = (
            rounds >= max_rounds if max_rounds > 0 else rounds - last_gain >= PASSES_WITHOUT_GAIN * rounds_per_pass
        )
        if is_enough and len(kept) + len(left_out) >= num_groups:
            break
        answered = next_round(rounds)
        num_raised += answered.num_raised
        num_timed_out += answered.num_timed_out
        for group in map(answered.group, range(len(answered.problems))):
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
            f"online filtering kept {len(kept)} of {len(kept) + len(left_out)} groups in {rounds} rounds; "
            f"{num_groups - len(kept)} of the dropped groups fill the batch"
        )
    joined = _joined((kept + left_out)[:num_groups], metrics)
    return dataclasses.replace(joined, num_raised=num_raised, num_timed_out=num_timed_out)


def group_mean(group: Rollouts, key: str) -> float:
    """Returns the mean of a reward field over a group.

    Raises:
        RewardError: the reward function did not return the field for every response.
    """
    missing = sum(key not in score for score in group.scores)
    if missing:
        known = sorted({name for score in group.scores for name in score})
        raise RewardError(
            f"algorithm.filter_key '{key}' is missing in {missing} of {len(group.scores)} reward results, which have: "
            f"{', '.join(known)}"
        )
    return sum(score[key] for score in group.scores) / len(group.scores)


def _joined(groups: Sequence[Rollouts], metrics: Metrics) -> Rollouts:
    return Rollouts(
        step=groups[0].step,
        problems=[problem for group in groups for problem in group.problems],
        prompts=[prompt for group in groups for prompt in group.prompts],
        generations=[generation for group in groups for generation in group.generations],
        responses=[response for group in groups for response in group.responses],
        scores=[score for group in groups for score in group.scores],
        correct=torch.cat([group.correct for group in groups]),
        metrics=metrics,
    )
