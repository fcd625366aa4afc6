"""Computes what is recorded of a step beside its method's metrics."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cepo.losses.importance import agreement_metrics
from cepo.metrics import Metrics, max_value, mean_of, mean_value, min_value, sum_value
from cepo.models.processing import Processing
from cepo.run_folder.pictures import png_bytes
from cepo.run_folder.trace import STUDENT, GroupRecord, RolloutRecord
from cepo.trainer.batches import ScoredBatch
from cepo.trainer.rollouts import Rollouts
from cepo.types import TokenSignal


def reward_metrics(rollouts: Rollouts) -> Metrics:
    """Returns metrics of rewards by field, lengths in tokens, and the share of responses cut by the length limit.

    A field that has the name of a metric of the rewards is recorded as `reward/score.<field>`.
    """
    lengths = rollouts.response_mask.sum(dim=1)
    metrics: Metrics = {
        "reward/mean": mean_of(rollouts.rewards),
        "reward/std": mean_value(float(rollouts.rewards.double().std(unbiased=False))),
        "reward/max": max_value(float(rollouts.rewards.max())),
        "reward/min": min_value(float(rollouts.rewards.min())),
        "reward/correct": mean_of(rollouts.correct.float()),
        "reward/num_raised": sum_value(rollouts.num_raised),
        "reward/num_timed_out": sum_value(rollouts.num_timed_out),
        "response_length/mean": mean_of(lengths),
        "response_length/max": max_value(float(lengths.max())),
        "response_length/min": min_value(float(lengths.min())),
        "response_length/clip_ratio": mean_of(~rollouts.finished),
        "prompt_length/mean": mean_of(torch.tensor([len(prompt.token_ids) for prompt in rollouts.prompts])),
    }
    keys: set[str] = set()
    for score in rollouts.scores:
        keys.update(score)
    keys.discard("overall")
    for key in sorted(keys):
        values = [score[key] for score in rollouts.scores if key in score]
        name = f"reward/{key}"
        metrics[f"reward/score.{key}" if name in metrics else name] = mean_of(torch.tensor(values))
    return metrics


def work_metrics(batch: ScoredBatch, temperature: float) -> Metrics:
    """Returns the shares of live and of scored rows, and how well the log-probs of engine and trainer agree.

    `rollout/entropy` is the engine's mean of -log P at temperature 1 over all sampled tokens. On-policy rows are left
    out of the agreement here; the update compares them.
    """
    rollouts = batch.rollouts
    plan = batch.plan
    is_scored = torch.tensor([row in plan.student for row in range(len(plan.live))])  # (B,)
    compared_rows = is_scored & ~plan.on_policy
    compared_tokens = rollouts.response_mask & compared_rows.unsqueeze(1)  # (B, T)
    metrics = {
        "work/live_fraction": mean_of(plan.live.float()),
        "work/scored_fraction": mean_of(is_scored.float()),
        "rollout/entropy": mean_of(-rollouts.sampled_log_probs, rollouts.response_mask),
    }
    return metrics | agreement_metrics(rollouts.sampled_log_probs, batch.old_log_probs, compared_tokens, temperature)


def group_records(
    batch: ScoredBatch, signal: TokenSignal, processing: Processing, views: Sequence[str], num_groups: int
) -> list[GroupRecord]:
    """Returns records of `num_groups` groups, preferring those with both right and wrong rollouts; `views` are all views."""
    rollouts = batch.rollouts
    mixed: list[int] = []
    uniform: list[int] = []
    for number in range(len(rollouts.problems)):
        rows = list(rollouts.rows_of(number))
        num_right = int(rollouts.correct[rows].sum())
        if 0 < num_right < rollouts.group_size:
            mixed.append(number)
        else:
            uniform.append(number)
    records: list[GroupRecord] = []
    for number in (mixed + uniform)[:num_groups]:
        problem = rollouts.problems[number]
        images = list(problem.images)
        for video in problem.videos:
            images += video.some_frames()
        records.append(
            GroupRecord(
                step=rollouts.step + 1,
                number=number,
                prompt_id=problem.prompt_id,
                problem=problem.text,
                ground_truth=problem.ground_truth,
                images=[png_bytes(image) for image in images],
                rollouts=[_rollout_record(batch, signal, processing, views, row) for row in rollouts.rows_of(number)],
            )
        )
    return records


def _rollout_record(
    batch: ScoredBatch, signal: TokenSignal, processing: Processing, views: Sequence[str], row: int
) -> RolloutRecord:
    rollouts = batch.rollouts
    generation = rollouts.generations[row]
    tokens: list[int] = generation.response_ids.tolist()

    def listed(values: Tensor | None) -> list[float] | None:
        if values is None:
            return None
        exact = values[row, : len(tokens)].detach().double().cpu()
        numbers: list[float] = exact.numpy().tolist()  # torch's own list has no type
        return numbers

    # A view without a plan in this step, or without this row, is recorded with None.
    log_probs: dict[str, list[float] | None] = {STUDENT: listed(batch.old_log_probs)} | dict.fromkeys(views)
    references: dict[str, str | None] = dict.fromkeys(views)
    for view in batch.plan.views:
        references[view.name] = view.references[row]
        if row in view.rows:
            log_probs[view.name] = listed(batch.teacher_log_probs[view.name])
    return RolloutRecord(
        response=rollouts.responses[row],
        token_ids=tokens,
        tokens=processing.token_texts(tokens),
        reward=float(rollouts.rewards[row]),
        accuracy=float(rollouts.correct[row]),
        token_advantages=listed(signal.advantages) or [],
        delta=listed(signal.diagnostics.get("delta")),
        weight=listed(signal.diagnostics.get("weight")),
        log_probs=log_probs,
        is_scored=row in batch.plan.student,
        references=references,
        finished=generation.finished,
    )
