"""Measures of a rollout batch that no method needs: rewards, lengths, agreement of engine and trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cepo.data.dataset import Problem
from cepo.errors import RewardError
from cepo.losses.objective import agreement_metrics
from cepo.metrics import Metrics, fraction, max_value, mean_of, mean_value, min_value, sum_value
from cepo.trainer.backend import Backend
from cepo.trainer.rollouts import RolloutBatch

PROMPTS_COMPARED = 8
"""Prompts of a step of which a response is scored at temperature 1, where the rollout temperature is another one."""


def reward_input(problem: Problem, response: str, response_length: int) -> dict[str, Any]:
    """What the reward function gets: EasyR1's three fields, the prompt, and the problem's other columns."""
    return {
        **problem.columns,
        "response": response,
        "response_length": response_length,
        "ground_truth": problem.ground_truth,
        "prompt": problem.text,
    }


def correctness(scores: Sequence[dict[str, float]], key: str, threshold: float) -> Tensor:
    """(B,) whether each response is right; the total reward decides only where the reward function has no such field.

    Raises:
        RewardError: some scores have the field and others do not.
    """
    present = [key in score for score in scores]
    if any(present) and not all(present):
        raise RewardError(f"algorithm.correct_key '{key}' is in only {sum(present)} of {len(scores)} reward results")
    field = key if all(present) else "overall"
    return torch.tensor([score[field] >= threshold for score in scores])


def reward_metrics(batch: RolloutBatch) -> Metrics:
    """Rewards by field, response lengths in tokens, and how many responses the length limit cut."""
    lengths = batch.response_mask.sum(dim=1)
    truncated = sum(not generation.finished for generation in batch.generations)
    metrics: Metrics = {
        "reward/mean": mean_of(batch.rewards),
        "reward/std": mean_value(float(batch.rewards.double().std(unbiased=False))),
        "reward/max": max_value(float(batch.rewards.max())),
        "reward/min": min_value(float(batch.rewards.min())),
        "reward/correct": mean_of(batch.correct.float()),
        "reward/num_raised": sum_value(batch.num_raised),
        "reward/num_timed_out": sum_value(batch.num_timed_out),
        "response_length/mean": mean_of(lengths),
        "response_length/max": max_value(float(lengths.max())),
        "response_length/min": min_value(float(lengths.min())),
        "response_length/clip_ratio": fraction(truncated, len(batch.generations)),
        "prompt_length/mean": mean_of(torch.tensor([len(prompt.token_ids) for prompt in batch.prompts])),
    }
    for key in sorted({key for score in batch.scores for key in score} - {"overall"}):
        metrics[f"reward/{key}"] = mean_of(torch.tensor([score[key] for score in batch.scores if key in score]))
    return metrics


def work_metrics(batch: RolloutBatch, scored: Tensor, temperature: float) -> Metrics:
    """The shares of rows that get any pass at all and a scoring pass, and how engine and trainer agree on the scored ones.

    `rollout/entropy`: the mean of -log P over all sampled tokens, at temperature 1 and by the engine. All rows count, so
    that it compares methods, which `actor/live_entropy` over the rows of an update does not.

    Rows of an on-policy optimizer batch are compared when they are updated.
    """
    compared = scored & ~batch.on_policy
    return {
        "work/live_fraction": mean_of(batch.live.float()),
        "work/scored_fraction": mean_of(scored.float()),
        "rollout/entropy": mean_of(-batch.sampled_log_probs, batch.response_mask),
    } | agreement_metrics(
        batch.sampled_log_probs, batch.old_log_probs, batch.response_mask & compared.unsqueeze(1), temperature
    )


def gap_at_temperature_1(batch: RolloutBatch, backend: Backend) -> Metrics:
    """How engine and trainer agree at another rollout temperature: the engine's log-probs are of logits as they are.

    The first response to each of `PROMPTS_COMPARED` prompts is scored once more, at temperature 1.
    """
    first = list(range(0, len(batch.generations), batch.group_size))[:PROMPTS_COMPARED]
    scored = backend.score([batch.scoring_row(row, keep_state=False) for row in first], temperature=1.0)
    sampled = [torch.tensor(batch.generations[row].log_probs) for row in first]
    counted = torch.ones(1, sum(map(len, sampled)), dtype=torch.bool)
    return agreement_metrics(torch.cat(sampled)[None], torch.cat(scored)[None], counted, 1.0)
