"""Validates on held-out problems."""

from __future__ import annotations

import dataclasses
import logging
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy
import torch
from PIL import Image

from cepo.config.schema import TrainerConfig
from cepo.data.dataset import ProblemSet
from cepo.data.prompts import ContextBuilder, Problem
from cepo.metrics import Metric, Metrics, fraction, mean_of, merge_metrics, sum_value
from cepo.models.interface import EncodedPrompt
from cepo.rollout.generator import SamplingSettings
from cepo.run_folder.pictures import thumbnail
from cepo.trainer.protocol import Backend
from cepo.trainer.rollouts import Rollouts
from cepo.trainer.sampling import VALIDATION_STEP, RolloutSampler
from cepo.types import TextReference

logger = logging.getLogger(__name__)

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
        sampler: RolloutSampler,
        *,
        settings: SamplingSettings,
        batch_size: int,
        trainer: TrainerConfig,
    ) -> None:
        self._problems = problems
        self._sampler = sampler
        self._settings = settings
        self._batch_size = batch_size if batch_size > 0 else len(problems)
        self._trainer = trainer
        self._greedy = dataclasses.replace(self._settings, num_samples=1, temperature=0.0)
        self._indices = list(range(len(problems)))  # of the problems that are validated
        if 0 < trainer.val_max_samples < len(problems):
            drawn = random.Random(f"validation/{trainer.seed}").sample(self._indices, trainer.val_max_samples)
            self._indices = sorted(drawn)
        places = range(len(self._indices))
        num_recorded = min(trainer.val_generations_to_log, len(places))
        self._recorded_places = set(random.Random(trainer.seed).sample(places, num_recorded))

    @property
    def num_responses(self) -> int:
        sampled = self._settings.num_samples * (1 + self._trainer.val_blind)
        return len(self._indices) * (sampled + self._trainer.val_greedy)

    def run(self, backend: Backend) -> tuple[Metrics, list[Mapping[str, object]]]:
        """Runs a validation and returns its metrics, means over all samples, and the responses to record."""
        parts: list[Metrics] = []
        rows: list[Mapping[str, object]] = []
        size = self._batch_size
        for start in range(0, len(self._indices), size):
            problems = [self._problems[index] for index in self._indices[start : start + size]]
            rollouts = self._sampler.sample(problems, backend, self._settings, step=VALIDATION_STEP)
            first_response = start * self._settings.num_samples
            lengths = [len(generation.response_ids) for generation in rollouts.generations]
            metrics: Metrics = {
                "val/reward": mean_of(rollouts.rewards),
                "val/accuracy": mean_of(rollouts.correct.float()),
                "val/response_length": mean_of(torch.tensor(lengths)),
                "val/num_samples": sum_value(len(lengths)),
            }
            num_probed = min(self._trainer.leak_probe_size - first_response, len(lengths))
            if num_probed > 0:
                metrics |= leak_metrics(rollouts, num_probed, self._sampler.contexts, backend)
            greedy = None
            if self._trainer.val_greedy:
                greedy = self._sampler.sample(problems, backend, self._greedy, step=VALIDATION_STEP)
                metrics["val/greedy_accuracy"] = mean_of(greedy.correct.float())
                metrics["val/num_greedy_samples"] = sum_value(len(greedy.correct))
                metrics["val/headroom"] = headroom(rollouts, greedy)
            if self._trainer.val_blind:
                metrics |= self._blind_metrics(problems, backend)
            parts.append(metrics)
            rows += self._recorded_rows(rollouts, start, greedy)
        if self._trainer.val_blind and not any("val/blind_accuracy" in metrics for metrics in parts):
            logger.warning("trainer.val_blind has no meaning here: no validated problem has an image")
        return merge_metrics(parts), rows

    def _blind_metrics(self, problems: Sequence[Problem], backend: Backend) -> Metrics:
        """Measures the accuracy on the problems with images when these are black; nothing if there are none."""
        with_images = [blackened(problem) for problem in problems if problem.images or problem.videos]
        if not with_images:
            return {}
        blind = self._sampler.sample(with_images, backend, self._settings, step=VALIDATION_STEP)
        return {
            "val/blind_accuracy": mean_of(blind.correct.float()),
            "val/num_blind_samples": sum_value(len(blind.correct)),
        }

    def _recorded_rows(self, rollouts: Rollouts, start: int, greedy: Rollouts | None) -> Iterator[Mapping[str, object]]:
        for number, problem in enumerate(rollouts.problems):
            if start + number not in self._recorded_places:
                continue
            verdict: dict[str, float] = {}
            if greedy is not None:
                verdict["greedy_accuracy"] = float(greedy.correct[number])
            for row in rollouts.rows_of(number):
                yield {
                    "prompt_id": problem.prompt_id,
                    "problem": problem.text,
                    "response": rollouts.responses[row],
                    "ground_truth": problem.ground_truth,
                    "accuracy": float(rollouts.correct[row]),
                    **verdict,
                    "image": thumbnail(problem.images),
                }


def blackened(problem: Problem) -> Problem:
    """Returns the problem with black images and films of the same sizes, so that its prompt has the same tokens."""
    return dataclasses.replace(
        problem,
        images=tuple(Image.new("RGB", image.size) for image in problem.images),
        videos=tuple(dataclasses.replace(video, frames=numpy.zeros_like(video.frames)) for video in problem.videos),
        image_source=None,
        teacher_images=(),
        teacher_image_source=None,
    )


def headroom(sampled: Rollouts, greedy: Rollouts) -> Metric:
    """Returns the share of problems that some sample solves, less that of the problems that the greedy response solves.

    Reinforcement learning makes likelier what sampling finds already: with little headroom it has little to find (arXiv
    2607.12640). With one sample per problem it is the difference of the two accuracies.
    """
    num_problems = len(sampled.problems)
    num_solved = 0
    for number in range(num_problems):
        rows = list(sampled.rows_of(number))
        if sampled.correct[rows].any():
            num_solved += 1
    return fraction(num_solved - int(greedy.correct.sum()), num_problems)


def leak_metrics(rollouts: Rollouts, num_rows: int, contexts: ContextBuilder, backend: Backend) -> Metrics:
    """Measures on the first `num_rows` responses to plain prompts whether the student behaves as if it had a hint.

    `leak/mention_fraction`: share of responses that refer to a given answer although none was given.
    `leak/hint_gap_right`, `leak/hint_gap_wrong`: mean over tokens of log P(y_t | x, right answer) - log P(y_t | x) in
    nats, over right and wrong responses separately. If the student has absorbed the hint's effect, the gap shrinks
    towards 0 on wrong responses too: it no longer needs the hint to respond that way. `leak/log_likelihood_gap`: the
    gap summed over each response, averaged over responses.
    """
    rows = range(num_rows)
    num_prompts = math.ceil(num_rows / rollouts.group_size)
    hinted_prompts: list[EncodedPrompt] = []  # may exceed the prompt's limit, because nothing is trained on them
    for problem, prompt in zip(rollouts.problems[:num_prompts], rollouts.prompts[:num_prompts], strict=True):
        hint = contexts.reference_text(TextReference(text=problem.ground_truth))
        hinted_prompts.append(contexts.teacher(problem, prompt, hint))
    hinted_rows = [rollouts.scoring_row(row, hinted_prompts[row // rollouts.group_size]) for row in rows]
    with_hint = backend.score(hinted_rows)
    without_hint = backend.score([rollouts.scoring_row(row) for row in rows])
    gaps = [hinted - plain for hinted, plain in zip(with_hint, without_hint, strict=True)]  # each (response length,)
    is_right = [rollouts.correct[row].expand(len(gaps[row])) for row in rows]
    token_gaps = torch.cat(gaps)
    token_is_right = torch.cat(is_right)
    num_mentions = sum(bool(MENTIONS.search(rollouts.responses[row])) for row in rows)
    return {
        "leak/mention_fraction": fraction(num_mentions, num_rows),
        "leak/hint_gap_right": mean_of(token_gaps, token_is_right),
        "leak/hint_gap_wrong": mean_of(token_gaps, ~token_is_right),
        "leak/log_likelihood_gap": mean_of(torch.stack([gap.sum() for gap in gaps])),
    }
