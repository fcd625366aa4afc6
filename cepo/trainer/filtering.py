"""Samples rounds of problems until enough groups of rollouts have rewards to learn from."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

import torch

from cepo.config.schema import AlgorithmConfig
from cepo.errors import RewardError
from cepo.metrics import fraction, sum_value
from cepo.trainer.rollouts import Rollouts

logger = logging.getLogger(__name__)
PASSES_WITHOUT_GAIN = 3
"""Number of passes over the data without a kept group after which filtering without a limit of rounds gives up."""


def ask_until_enough(
    next_round: Callable[[int], Rollouts],
    algorithm: AlgorithmConfig,
    *,
    num_groups: int,
    max_rounds: int,
    rounds_per_pass: int,
) -> Rollouts:
    """Samples rounds of problems until `num_groups` groups have `filter_low < mean(filter_key) < filter_high` (DAPO).

    A round may yield no such group. After `max_rounds` rounds a warning is logged and dropped groups fill the batch:
    they have little or no gradient, but the step counts. If `max_rounds` is 0 or less, this happens after three passes
    over the data, of `rounds_per_pass` rounds each, without a kept group; otherwise the loop might never end.
    `next_round` returns rollouts of the next problems, given the number of earlier rounds in this step.
    """
    kept: list[tuple[Rollouts, int]] = []
    left_out: list[tuple[Rollouts, int]] = []
    asked: list[Rollouts] = []
    last_gain = 0
    while len(kept) < num_groups:
        rounds, without_gain = len(asked), len(asked) - last_gain
        is_enough = rounds >= max_rounds if max_rounds > 0 else without_gain >= PASSES_WITHOUT_GAIN * rounds_per_pass
        if is_enough and len(kept) + len(left_out) >= num_groups:
            break
        asked.append(next_round(rounds))
        for number in range(len(asked[-1].problems)):
            value = _group_mean(asked[-1], number, algorithm.filter_key)
            is_kept = algorithm.filter_low < value < algorithm.filter_high
            (kept if is_kept else left_out).append((asked[-1], number))
            last_gain = len(asked) if is_kept else last_gain
    seen, filled = len(kept) + len(left_out), max(0, num_groups - len(kept))
    if filled:
        logger.warning(
            f"online filtering kept {len(kept)} of {seen} groups in {len(asked)} rounds; {filled} of the dropped groups "
            "fill the batch"
        )
    metrics = {
        "filter/kept_fraction": fraction(len(kept), seen),
        "filter/rounds": sum_value(len(asked)),
        "filter/filled_groups": sum_value(filled),
    }
    return dataclasses.replace(
        _joined((kept + left_out)[:num_groups]),
        num_raised=sum(each.num_raised for each in asked),
        num_timed_out=sum(each.num_timed_out for each in asked),
        metrics=metrics,
    )


def _group_mean(rollouts: Rollouts, number: int, key: str) -> float:
    scores = [rollouts.scores[row] for row in rollouts.rows_of(number)]
    if missing := sum(key not in score for score in scores):
        known = ", ".join(sorted({name for score in scores for name in score}))
        raise RewardError(
            f"algorithm.filter_key '{key}' is missing in {missing} of {len(scores)} reward results, which have: {known}"
        )
    return sum(score[key] for score in scores) / len(scores)


def _joined(groups: Sequence[tuple[Rollouts, int]]) -> Rollouts:
    rows = [(rollouts, row) for rollouts, number in groups for row in rollouts.rows_of(number)]
    return Rollouts(
        step=groups[0][0].step,
        problems=[rollouts.problems[number] for rollouts, number in groups],
        prompts=[rollouts.prompts[number] for rollouts, number in groups],
        generations=[rollouts.generations[row] for rollouts, row in rows],
        responses=[rollouts.responses[row] for rollouts, row in rows],
        scores=[rollouts.scores[row] for rollouts, row in rows],
        correct=torch.stack([rollouts.correct[row] for rollouts, row in rows]),
    )
