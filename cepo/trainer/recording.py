"""Computes what is recorded of a step beside its method's metrics, and validates on held-out problems."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from cepo.config.schema import AlgorithmConfig, DataConfig, TrainerConfig, WorkerConfig
from cepo.data.contexts import ContextBuilder
from cepo.data.dataset import ProblemSet
from cepo.losses.policy import agreement_metrics
from cepo.metrics import Metrics, fraction, max_value, mean_of, mean_value, merge_metrics, min_value, sum_value
from cepo.models.processing import Processing
from cepo.rewards.pool import RewardPool
from cepo.run_folder.pictures import png_bytes, thumbnail
from cepo.run_folder.trace import STUDENT, GroupRecord, RolloutRecord
from cepo.trainer.asking import VALIDATION_STEP, Asker, Rollouts, validation_settings
from cepo.trainer.planning import ScoredBatch
from cepo.trainer.protocol import Backend
from cepo.types import Reference, TokenSignal


def reward_metrics(rollouts: Rollouts) -> Metrics:
    """Returns metrics of rewards by field, lengths in tokens, and the share of responses cut by the length limit."""
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
    for key in sorted({key for score in rollouts.scores for key in score} - {"overall"}):
        metrics[f"reward/{key}"] = mean_of(torch.tensor([score[key] for score in rollouts.scores if key in score]))
    return metrics


def work_metrics(batch: ScoredBatch, temperature: float) -> Metrics:
    """Returns the shares of live and of scored rows, and how well the log-probs of engine and trainer agree.

    `rollout/entropy` is the engine's mean of -log P at temperature 1 over all sampled tokens. On-policy rows are left
    out of the agreement here; the update compares them.
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
    batch: ScoredBatch, signal: TokenSignal, processing: Processing, views: Sequence[str], num_groups: int
) -> list[GroupRecord]:
    """Returns records of `num_groups` groups, preferring those with both right and wrong rollouts; `views` are all views."""
    rollouts = batch.rollouts
    size, numbers = rollouts.group_size, range(len(rollouts.problems))
    num_right = [int(number) for number in rollouts.correct.view(len(numbers), size).sum(dim=1)]
    records: list[GroupRecord] = []
    for number in sorted(numbers, key=lambda number: (not 0 < num_right[number] < size, number))[:num_groups]:
        problem = rollouts.problems[number]
        frames = [frame for video in problem.videos for frame in video.some_frames()]
        records.append(
            GroupRecord(
                step=rollouts.step + 1,
                number=number,
                prompt_id=problem.prompt_id,
                problem=problem.text,
                ground_truth=problem.ground_truth,
                images=[png_bytes(image) for image in (*problem.images, *frames)],
                rollouts=[_rollout_record(batch, signal, processing, views, row) for row in rollouts.rows_of(number)],
            )
        )
    return records


def _rollout_record(
    batch: ScoredBatch, signal: TokenSignal, processing: Processing, views: Sequence[str], row: int
) -> RolloutRecord:
    rollouts, planned = batch.rollouts, {view.name: view for view in batch.plan.views}
    tokens = rollouts.generations[row].response_ids

    def listed(values: Tensor | None) -> list[float] | None:
        return None if values is None else [float(value) for value in values[row, : len(tokens)]]

    scored = {name: name in planned and row in planned[name].rows for name in views}
    return RolloutRecord(
        response=rollouts.responses[row],
        token_ids=tokens,
        tokens=processing.token_texts(tokens),
        reward=float(rollouts.rewards[row]),
        accuracy=float(rollouts.correct[row]),
        token_advantages=listed(signal.advantages) or [],
        delta=listed(signal.diagnostics.get("delta")),
        weight=listed(signal.diagnostics.get("weight")),
        log_probs={
            STUDENT: listed(batch.old_log_probs),
            **{name: listed(batch.teacher_log_probs[name]) if scored[name] else None for name in views},
        },
        is_scored=row in batch.plan.student,
        references={name: planned[name].references[row] if name in planned else None for name in views},
        finished=rollouts.generations[row].finished,
    )


MENTIONS = re.compile(
    r"\b(?:sample|given|provided|reference|known|stated|suggested)\s+(?:final\s+|correct\s+)?(?:answer|solution)\b"
    r"|\b(?:answer|solution)\s+(?:is\s+)?(?:given|provided|stated)\b|\bthe\s+hint\b",
    re.IGNORECASE,
)
"""Matches phrases in which a response refers to a given answer."""


class Validator:
    """Samples and rewards responses to the held-out problems, or to a subset that is the same at every validation."""

    def __init__(
        self,
        problems: ProblemSet,
        data: DataConfig,
        algorithm: AlgorithmConfig,
        worker: WorkerConfig,
        trainer: TrainerConfig,
        contexts: ContextBuilder,
        processing: Processing,
        rewards: RewardPool,
    ) -> None:
        self._problems, self._data, self._trainer, self._contexts = problems, data, trainer, contexts
        self._asker = Asker(worker, algorithm, contexts, processing, rewards)
        self._settings = validation_settings(worker.rollout, data)
        self._greedy = dataclasses.replace(self._settings, num_samples=1, temperature=0.0)
        self._asked = list(range(len(problems)))
        if 0 < trainer.val_max_samples < len(problems):
            drawn = random.Random(f"validation/{trainer.seed}").sample(self._asked, trainer.val_max_samples)
            self._asked = sorted(drawn)
        recorded = min(trainer.val_generations_to_log, len(self._asked))
        self._recorded = set(random.Random(trainer.seed).sample(range(len(self._asked)), recorded))

    @property
    def num_responses(self) -> int:
        return len(self._asked) * (self._settings.num_samples + self._trainer.val_greedy)

    def run(self, backend: Backend) -> tuple[Metrics, list[Mapping[str, object]]]:
        """Runs a validation and returns its metrics, means over all samples, and the responses to record."""
        parts: list[Metrics] = []
        rows: list[Mapping[str, object]] = []
        size = self._data.val_batch_size
        size = len(self._asked) if size < 0 else size
        for start in range(0, len(self._asked), size):
            problems = [self._problems[index] for index in self._asked[start : start + size]]
            rollouts = self._asker.ask(problems, backend, self._settings, step=VALIDATION_STEP)
            first = start * self._settings.num_samples
            lengths = [len(generation.response_ids) for generation in rollouts.generations]
            metrics: Metrics = {
                "val/reward": mean_of(rollouts.rewards),
                "val/accuracy": mean_of(rollouts.correct.float()),
                "val/response_length": mean_of(torch.tensor(lengths)),
                "val/num_samples": sum_value(len(lengths)),
            }
            probed = min(self._trainer.leak_probe_size - first, len(lengths))
            if probed > 0:
                metrics |= leak_metrics(rollouts, probed, self._contexts, backend)
            greedy = None
            if self._trainer.val_greedy:
                greedy = self._asker.ask(problems, backend, self._greedy, step=VALIDATION_STEP)
                metrics["val/greedy_accuracy"] = mean_of(greedy.correct.float())
                metrics["val/num_greedy_samples"] = sum_value(len(greedy.correct))
            parts.append(metrics)
            rows += self._recorded_rows(rollouts, start, greedy)
        return merge_metrics(parts), rows

    def _recorded_rows(self, rollouts: Rollouts, start: int, greedy: Rollouts | None) -> Iterator[Mapping[str, object]]:
        for number, problem in enumerate(rollouts.problems):
            verdict = {} if greedy is None else {"greedy_accuracy": float(greedy.correct[number])}
            for row in rollouts.rows_of(number) if start + number in self._recorded else ():
                yield {
                    "prompt_id": problem.prompt_id,
                    "problem": problem.text,
                    "response": rollouts.responses[row],
                    "ground_truth": problem.ground_truth,
                    "accuracy": float(rollouts.correct[row]),
                    **verdict,
                    "image": thumbnail(problem.images),
                }


def leak_metrics(rollouts: Rollouts, num_rows: int, contexts: ContextBuilder, backend: Backend) -> Metrics:
    """Measures on the first `num_rows` responses to plain prompts whether the student behaves as if it had a hint.

    `leak/mention_fraction`: share of responses that refer to a given answer although none was given.
    `leak/hint_gap_right`, `leak/hint_gap_wrong`: mean over tokens of log P(y_t | x, right answer) - log P(y_t | x) in
    nats, over right and wrong responses separately. If the student has absorbed the hint's effect, the gap shrinks
    towards 0 on wrong responses too: it no longer needs the hint to respond that way. `leak/log_likelihood_gap`: the
    gap summed over each response, averaged over responses.
    """
    rows, size = range(num_rows), rollouts.group_size
    probed = zip(rollouts.problems[: -(-num_rows // size)], rollouts.prompts, strict=False)
    hinted = [  # may exceed the prompt's limit, because nothing is trained on it
        contexts.teacher(problem, prompt, contexts.reference_text(Reference(text=problem.ground_truth)))
        for problem, prompt in probed
    ]
    with_hint = backend.score([rollouts.scoring_row(row, hinted[row // size]) for row in rows])
    without = backend.score([rollouts.scoring_row(row) for row in rows])
    gaps = [one - other for one, other in zip(with_hint, without, strict=True)]
    flat, right = torch.cat(gaps), torch.cat([rollouts.correct[row].expand(len(gaps[row])) for row in rows])
    return {
        "leak/mention_fraction": fraction(
            sum(bool(MENTIONS.search(rollouts.responses[row])) for row in rows), num_rows
        ),
        "leak/hint_gap_right": mean_of(flat, right),
        "leak/hint_gap_wrong": mean_of(flat, ~right),
        "leak/log_likelihood_gap": mean_of(torch.stack([gap.sum() for gap in gaps])),
    }
