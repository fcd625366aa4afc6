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


def sample_until_enough(
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
    useful: list[tuple[Rollouts, int]] = []  # groups, as rollouts and a prompt's number among them
    dropped: list[tuple[Rollouts, int]] = []
    rounds: list[Rollouts] = []
    rounds_without_gain = 0
    while len(useful) < num_groups:
        has_used_all_rounds = max_rounds > 0 and len(rounds) >= max_rounds
        gives_up = max_rounds <= 0 and rounds_without_gain >= PASSES_WITHOUT_GAIN * rounds_per_pass
        can_fill_batch = len(useful) + len(dropped) >= num_groups
        if (has_used_all_rounds or gives_up) and can_fill_batch:
            break
        rollouts = next_round(len(rounds))
        rounds.append(rollouts)
        rounds_without_gain += 1
        for number in range(len(rollouts.problems)):
            mean = _group_mean(rollouts, number, algorithm.filter_key)
            if algorithm.filter_low < mean < algorithm.filter_high:
                useful.append((rollouts, number))
                rounds_without_gain = 0
            else:
                dropped.append((rollouts, number))
    num_sampled = len(useful) + len(dropped)
    num_filled = max(0, num_groups - len(useful))
    if num_filled:
        logger.warning(
            f"online filtering kept {len(useful)} of {num_sampled} groups in {len(rounds)} rounds; {num_filled} of the "
            "dropped groups fill the batch"
        )
    metrics = {
        "filter/kept_fraction": fraction(len(useful), num_sampled),
        "filter/rounds": sum_value(len(rounds)),
        "filter/filled_groups": sum_value(num_filled),
    }
    groups = useful + dropped
    return dataclasses.replace(
        _joined(groups[:num_groups]),
        num_raised=sum(rollouts.num_raised for rollouts in rounds),
        num_timed_out=sum(rollouts.num_timed_out for rollouts in rounds),
        metrics=metrics,
    )


def _group_mean(rollouts: Rollouts, number: int, key: str) -> float:
    scores = [rollouts.scores[row] for row in rollouts.rows_of(number)]
    num_missing = sum(key not in score for score in scores)
    if num_missing:
        known: set[str] = set()
        for score in scores:
            known.update(score)
        raise RewardError(
            f"algorithm.filter_key '{key}' is missing in {num_missing} of {len(scores)} reward results, which have: "
            f"{', '.join(sorted(known))}"
        )
    return sum(score[key] for score in scores) / len(scores)


def _joined(groups: Sequence[tuple[Rollouts, int]]) -> Rollouts:
    """Returns rollouts of the groups, each of which is given as rollouts and a prompt's number among them."""
    rows: list[tuple[Rollouts, int]] = []
    for rollouts, number in groups:
        rows += [(rollouts, row) for row in rollouts.rows_of(number)]
    first_rollouts, _ = groups[0]
    return Rollouts(
        step=first_rollouts.step,
        problems=[rollouts.problems[number] for rollouts, number in groups],
        prompts=[rollouts.prompts[number] for rollouts, number in groups],
        generations=[rollouts.generations[row] for rollouts, row in rows],
        responses=[rollouts.responses[row] for rollouts, row in rows],
        scores=[rollouts.scores[row] for rollouts, row in rows],
        correct=torch.stack([rollouts.correct[row] for rollouts, row in rows]),
    )
