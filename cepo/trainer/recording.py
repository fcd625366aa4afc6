"""Records a step: metrics that no method needs, and some of its groups for `rollouts.jsonl`."""

from __future__ import annotations

import torch

from cepo.losses.objective import agreement_metrics
from cepo.metrics import Metrics, fraction, max_value, mean_of, mean_value, min_value, sum_value
from cepo.models.processing import Processing
from cepo.tracking.run_folder import GroupRecord, RolloutRecord, png_bytes
from cepo.trainer.asking import Rollouts
from cepo.trainer.scoring import ScoredBatch
from cepo.types import TokenSignal


def reward_metrics(rollouts: Rollouts) -> Metrics:
    """Returns rewards by field, response lengths in tokens, and how many responses the length limit cut."""
    lengths = rollouts.response_mask.sum(dim=1)
    truncated = sum(not generation.finished for generation in rollouts.generations)
    metrics: Metrics = {
        "reward/mean": mean_of(rollouts.rewards),
        "reward/std": mean_value(float(rollouts.rewards.double().std(unbiased=False))),
        "reward/max": max_value(float(rollouts.rewards.max())),
        "reward/min": min_value(float(rollouts.rewards.min())),
        "reward/correct": mean_of(rollouts.correct.float()),
        "reward/num_raised": sum_value(rollouts.num_raised),
        "reward/num_timed_out": sum_value(rollouts.num_timed_out),
        "reward/num_ungraded": sum_value(rollouts.num_ungraded),
        "response_length/mean": mean_of(lengths),
        "response_length/max": max_value(float(lengths.max())),
        "response_length/min": min_value(float(lengths.min())),
        "response_length/clip_ratio": fraction(truncated, len(rollouts.generations)),
        "prompt_length/mean": mean_of(torch.tensor([len(prompt.token_ids) for prompt in rollouts.prompts])),
    }
    for key in sorted({key for score in rollouts.scores for key in score} - {"overall"}):
        metrics[f"reward/{key}"] = mean_of(torch.tensor([score[key] for score in rollouts.scores if key in score]))
    return metrics


def work_metrics(batch: ScoredBatch, temperature: float) -> Metrics:
    """Returns the shares of rows with any pass and with a scoring pass, and how engine and trainer agree.

    `rollout/entropy`: the mean of -log P over all sampled tokens, at temperature 1 and by the engine. All rows count,
    so that it can be compared between methods, unlike `actor/live_entropy` over the rows of an update.

    Rows of an on-policy optimizer batch are compared when they are updated.
    """
    rollouts, plan = batch.rollouts, batch.plan
    scored = torch.tensor([row in plan.student for row in range(len(plan.live))])
    compared = rollouts.response_mask & (scored & ~plan.on_policy).unsqueeze(1)
    return {
        "work/live_fraction": mean_of(plan.live.float()),
        "work/scored_fraction": mean_of(scored.float()),
        "rollout/entropy": mean_of(-rollouts.sampled_log_probs, rollouts.response_mask),
    } | agreement_metrics(rollouts.sampled_log_probs, batch.old_log_probs, compared, temperature)


def group_records(
    batch: ScoredBatch, signal: TokenSignal, processing: Processing, num_groups: int
) -> list[GroupRecord]:
    """Returns the first `num_groups` groups, those with right and wrong rollouts before the others."""
    rollouts = batch.rollouts
    size, numbers = rollouts.group_size, range(len(rollouts.problems))
    num_right = [int(number) for number in rollouts.correct.view(len(numbers), size).sum(dim=1)]
    chosen = sorted(numbers, key=lambda number: (not 0 < num_right[number] < size, number))[:num_groups]
    return [_group_record(batch, signal, processing, number) for number in chosen]


def _group_record(batch: ScoredBatch, signal: TokenSignal, processing: Processing, number: int) -> GroupRecord:
    rollouts = batch.rollouts
    problem, rows = rollouts.problems[number], rollouts.rows_of(number)
    texts = {view.name: [view.references[row] for row in rows] for view in batch.plan.views}
    common = {name: shown[0] if len(set(shown)) == 1 else None for name, shown in texts.items()}
    own = {name: shown for name, shown in texts.items() if len(set(shown)) > 1}
    images = (*problem.images, *(video.first_frame() for video in problem.videos))
    return GroupRecord(
        step=rollouts.step + 1,
        prompt_id=problem.prompt_id,
        problem=problem.text,
        ground_truth=problem.ground_truth,
        image=png_bytes(images[0]) if images else None,
        references=common,
        rollouts=[
            _rollout_record(rollouts, signal, processing, row, {name: shown[place] for name, shown in own.items()})
            for place, row in enumerate(rows)
        ],
    )


def _rollout_record(
    rollouts: Rollouts, signal: TokenSignal, processing: Processing, row: int, references: dict[str, str | None]
) -> RolloutRecord:
    tokens = rollouts.generations[row].response_ids
    advantages = signal.advantages[row, : len(tokens)]

    def diagnostic(name: str) -> list[float] | None:
        values = signal.diagnostics.get(name)
        return None if values is None else [float(value) for value in values[row, : len(tokens)]]

    return RolloutRecord(
        response=rollouts.responses[row],
        tokens=processing.token_texts(tokens),
        reward=float(rollouts.rewards[row]),
        accuracy=float(rollouts.correct[row]),
        advantage=float(advantages.mean()),
        token_advantages=[float(advantage) for advantage in advantages],
        delta=diagnostic("delta"),
        weight=diagnostic("weight"),
        references=references,
    )
