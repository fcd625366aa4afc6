"""Accuracy on held-out problems, with the same sampling noise every time, so that two validations can be paired."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from cepo.config import RunConfig
from cepo.data.contexts import ContextBuilder
from cepo.data.dataset import Problem, ProblemSet
from cepo.metrics import Metrics, mean_of, merge_metrics, sum_value
from cepo.models.processing import Processing
from cepo.rewards.pool import RewardPool
from cepo.trainer.backend import Backend
from cepo.trainer.leak import ValidationSample, leak_metrics
from cepo.trainer.measures import correctness
from cepo.trainer.rewarding import Rewarding
from cepo.trainer.sampling import generation_request, validation_settings

VALIDATION_STEP = -1
"""Keys the sampling seeds of validation: the same at every validation, and no training step's."""


class Validator:
    """Samples `n` responses to each held-out problem and scores them, finished groups while others are still sampled.

    Under `trainer.val_max_samples` a part of the problems, the same at every validation.

    Args:
        config: `worker.rollout` with `val_override_config` on top says how to sample.
    """

    def __init__(
        self,
        problems: ProblemSet,
        config: RunConfig,
        contexts: ContextBuilder,
        processing: Processing,
        rewards: RewardPool,
    ) -> None:
        self._problems, self._config = problems, config
        self._contexts, self._processing, self._rewards = contexts, processing, rewards
        self._settings = validation_settings(config)
        self._asked = list(range(len(problems)))
        if 0 < config.trainer.val_max_samples < len(problems):
            drawn = random.Random(f"validation/{config.trainer.seed}").sample(
                self._asked, config.trainer.val_max_samples
            )
            self._asked = sorted(drawn)
        recorded = min(config.trainer.val_generations_to_log, len(self._asked))
        self._recorded = set(random.Random(config.trainer.seed).sample(range(len(self._asked)), recorded))

    @property
    def num_responses(self) -> int:
        """Responses that one validation samples."""
        return len(self._asked) * self._settings.num_samples

    def run(self, backend: Backend) -> tuple[Metrics, list[Mapping[str, Any]]]:
        """Metrics `val/*` (means over all samples) and the recorded responses."""
        parts: list[Metrics] = []
        rows: list[Mapping[str, Any]] = []
        for start, problems in self._batches():
            prompts = [self._contexts.student(problem) for problem in problems]
            seed = self._config.worker.rollout.seed
            requests = [
                generation_request(problem, prompt, seed=seed, step=VALIDATION_STEP)
                for problem, prompt in zip(problems, prompts, strict=True)
            ]
            with Rewarding(problems, self._config, self._processing, self._rewards) as rewarding:
                groups = backend.generate(requests, self._settings, rewarding.begin)
                responses, outcome = rewarding.finish(groups)
            samples = [
                ValidationSample(problem, prompt, one)
                for problem, prompt, group in zip(problems, prompts, groups, strict=True)
                for one in group
            ]
            first = start * self._settings.num_samples
            metrics, recorded = self._measure(samples, responses, outcome.scores, backend, first=first)
            parts.append(metrics)
            rows += recorded
        return merge_metrics(parts), rows

    def _batches(self) -> Iterable[tuple[int, list[Problem]]]:
        size = self._config.data.val_batch_size
        size = len(self._asked) if size < 0 else size
        for start in range(0, len(self._asked), size):
            yield start, [self._problems[index] for index in self._asked[start : start + size]]

    def _measure(
        self,
        samples: list[ValidationSample],
        responses: list[str],
        scores: list[dict[str, float]],
        backend: Backend,
        *,
        first: int,
    ) -> tuple[Metrics, list[Mapping[str, Any]]]:
        algorithm = self._config.algorithm
        correct = correctness(scores, algorithm.correct_key, algorithm.correct_threshold).float()
        metrics: Metrics = {
            "val/reward": mean_of(torch.tensor([score["overall"] for score in scores])),
            "val/accuracy": mean_of(correct),
            "val/response_length": mean_of(torch.tensor([len(one.response_ids) for _, _, one in samples])),
            "val/num_samples": sum_value(len(scores)),
        }
        probed = max(0, self._config.trainer.leak_probe_size - first)
        if probed > 0:
            shown = slice(0, probed)
            metrics |= leak_metrics(samples[shown], responses[shown], correct[shown], self._contexts, backend)
        rows: list[Mapping[str, Any]] = [
            {
                "prompt_id": problem.prompt_id,
                "problem": problem.text,
                "response": response,
                "ground_truth": problem.ground_truth,
                "accuracy": float(accuracy),
            }
            for number, ((problem, _, _), response, accuracy) in enumerate(
                zip(samples, responses, correct, strict=True)
            )
            if (first + number) // self._settings.num_samples in self._recorded
        ]
        return metrics, rows
