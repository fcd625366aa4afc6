"""Samples and rewards rollouts for training, validation and evaluation, and filters them for training."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from cepo.config.schema import AlgorithmConfig, DataConfig
from cepo.config.worker_schema import RolloutConfig, WorkerConfig
from cepo.data.batch import OWN_VIEW, ScoringRow
from cepo.data.contexts import ContextBuilder, Problem
from cepo.errors import RewardError
from cepo.files.trees import Fields, Tree
from cepo.metrics import Metric, Metrics, fraction, sum_value
from cepo.models.inputs import EncodedPrompt
from cepo.models.processing import Processing
from cepo.rewards.functions import RewardOutcome
from cepo.rewards.pool import RewardPool
from cepo.rewards.samples import TrainersFields, sample_of
from cepo.rollout.generator import Generation, GenerationRequest, Sampler, SamplingSettings, sampling_seed
from cepo.trainer.stage_clock import StageClock

logger = logging.getLogger(__name__)

VALIDATION_STEP = -1
"""Step number in the sampling seeds of validation. It is the same at every validation and no training step has it."""
PASSES_WITHOUT_GAIN = 3
"""Number of passes over the data without a kept group after which filtering without a limit of rounds gives up."""


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Prompts and their rewarded responses. Row `b` of every tensor is response `b % G` to prompt `b // G`."""

    step: int
    problems: Sequence[Problem]
    prompts: Sequence[EncodedPrompt]
    generations: Sequence[Generation]
    responses: Sequence[str]
    scores: Sequence[Mapping[str, float]]  # the reward function's fields for each row
    correct: Tensor
    num_raised: int = 0  # number of responses whose reward failed, here and below
    num_timed_out: int = 0
    reward_baselines: Tensor | None = None  # (B,) of the prompt's greedy response, for methods with this baseline
    metrics: Metrics = field(default_factory=dict[str, Metric])  # of online filtering

    @property
    def group_size(self) -> int:
        """G, the number of rollouts per prompt."""
        return len(self.generations) // len(self.problems)

    @cached_property
    def rewards(self) -> Tensor:
        """(B,) the total reward of each response."""
        return torch.tensor([score["overall"] for score in self.scores])

    @cached_property
    def group_ids(self) -> Tensor:
        """(B,) the prompt number of each row."""
        return torch.arange(len(self.problems)).repeat_interleave(self.group_size)

    @cached_property
    def response_mask(self) -> Tensor:
        """(B, T) True on response tokens, where T is the length of the longest response."""
        lengths = torch.tensor([len(generation.response_ids) for generation in self.generations])
        return torch.arange(int(lengths.max())).unsqueeze(0) < lengths.unsqueeze(1)

    @cached_property
    def finished(self) -> Tensor:
        """(B,) False on responses that the length limit cut."""
        return torch.tensor([generation.finished for generation in self.generations])

    @cached_property
    def sampled_log_probs(self) -> Tensor:
        """(B, T) the rollout engine's own log-probs of the sampled tokens, 0 on padding."""
        return self.padded([generation.log_probs for generation in self.generations])

    @cached_property
    def token_level_rewards(self) -> Tensor:
        """(B, T) the outcome reward at the last response token, 0 elsewhere."""
        rewards = torch.zeros(self.response_mask.shape)
        last = self.response_mask.sum(dim=1) - 1
        rewards[torch.arange(len(last)), last] = self.rewards
        return rewards

    def rows_of(self, number: int) -> range:
        return range(number * self.group_size, (number + 1) * self.group_size)

    def padded(self, rows: Sequence[Tensor] | Sequence[Sequence[float]]) -> Tensor:
        """Returns each row's values, one per response token, as a (B, T) tensor with 0 on padding."""
        result = torch.zeros(self.response_mask.shape)
        result[self.response_mask] = torch.cat([torch.as_tensor(row, dtype=torch.float32) for row in rows])
        return result

    def scoring_row(self, row: int, context: EncodedPrompt | None = None, *, view: str = OWN_VIEW) -> ScoringRow:
        """Returns the row to score: its response after the student's prompt, or after the context of a view."""
        number = row // self.group_size
        return ScoringRow(
            context=context or self.prompts[number],
            response_ids=self.generations[row].response_ids,
            prompt=number,
            row=row,
            view=view,
        )


class Asker:
    """Samples responses to problems, and rewards and judges each group as soon as it is finished."""

    def __init__(
        self,
        worker: WorkerConfig,
        algorithm: AlgorithmConfig,
        contexts: ContextBuilder,
        processing: Processing,
        rewards: RewardPool,
        clock: StageClock | None = None,
    ) -> None:
        self._worker, self._algorithm, self._contexts = worker, algorithm, contexts
        self._processing, self._rewards = processing, rewards
        self._clock = clock or StageClock()

    def ask(
        self,
        problems: Sequence[Problem],
        engine: Sampler,
        settings: SamplingSettings,
        *,
        step: int,
        attempt: int = 0,
        prompts: Sequence[EncodedPrompt] | None = None,
    ) -> Rollouts:
        """Samples and rewards responses in the problems' order; a failed or late reward affects only its response.

        `prompts` are the problems' encoded prompts, if the caller has them.

        Finished groups are rewarded while others are still being sampled, so the stage "reward" measures only the time
        that generation does not cover. Sampling seeds depend only on (seed, step, attempt, problem, its occurrence).
        Raises `DataError`: a prompt is too long; `RewardError`: no response of this round or any earlier one got a score.
        """
        responses: dict[int, list[str]] = {}
        with self._rewards.stream() as stream:

            def begin(index: int, group: Sequence[Generation]) -> None:
                responses[index] = [self._decoded(generation.response_ids) for generation in group]
                pairs = zip(responses[index], group, strict=True)
                stream.add(index, [self._input(problems[index], text, one.response_ids) for text, one in pairs])

            with self._clock.stage("generate"):
                if prompts is None:
                    prompts = [self._contexts.student(problem) for problem in problems]
                requests: list[GenerationRequest] = []
                asked: Counter[str] = Counter()
                for problem, prompt in zip(problems, prompts, strict=True):
                    copy = asked[problem.prompt_id]
                    asked[problem.prompt_id] += 1
                    name = f"{problem.prompt_id}#{copy}" if copy else problem.prompt_id
                    seed = sampling_seed(self._worker.rollout.seed, step, name, attempt=attempt)
                    requests.append(request(problem, prompt, seed))
                groups = engine.generate(requests, settings, begin)
            generations = [generation for group in groups for generation in group]
            self._clock.count_tokens("generate", sum(len(generation.response_ids) for generation in generations))
            with self._clock.stage("reward"):
                for index, group in enumerate(groups):
                    if index not in stream:  # a backend need not report finished groups
                        begin(index, group)
                outcome = stream.outcome()
                correct = self._correct(outcome)
        return Rollouts(
            step=step,
            problems=problems,
            prompts=prompts,
            generations=generations,
            responses=[text for index in range(len(groups)) for text in responses[index]],
            scores=outcome.scores,
            correct=correct,
            num_raised=outcome.num_raised,
            num_timed_out=outcome.num_timed_out,
        )

    def with_baselines(self, rollouts: Rollouts, engine: Sampler, settings: SamplingSettings) -> Rollouts:
        """Returns the rollouts with each prompt's greedy response rewarded as a baseline; raises as `ask` does."""
        greedy = dataclasses.replace(settings, num_samples=1, temperature=0.0)
        answered = self.ask(rollouts.problems, engine, greedy, step=rollouts.step, prompts=rollouts.prompts)
        return dataclasses.replace(rollouts, reward_baselines=answered.rewards.repeat_interleave(rollouts.group_size))

    def answers(self, rollouts: Rollouts) -> list[str | None]:
        return self._rewards.extracted_answers(rollouts.responses)

    def verdicts(self, responses: Sequence[tuple[Problem, Sequence[int]]]) -> Tensor:
        """Rewards given responses' tokens and returns (B,) whether each is right; raises `RewardError` as `ask` does."""
        inputs = [self._input(problem, self._decoded(tokens), tokens) for problem, tokens in responses]
        return self._correct(self._rewards.score(inputs))

    def _input(self, problem: Problem, text: str, tokens: Sequence[int]) -> Tree:
        judged = self._processing.prefilled + text  # the `<think>` of a template is a part of what it began
        return reward_input(problem, judged, len(tokens), self._rewards.needs_images)

    def _correct(self, outcome: RewardOutcome) -> Tensor:
        """Returns (B,) whether `correct_key` of each score, or the total reward without such a field, is high enough."""
        self._rewards.require_a_score(outcome)
        key, scores = self._algorithm.correct_key, outcome.scores
        num_present = sum(key in score for score in scores)
        if 0 < num_present < len(scores):
            raise RewardError(
                f"algorithm.correct_key '{key}' is in only {num_present} of {len(scores)} reward results; "
                "a reward function must return it for every response or for none"
            )
        read = key if num_present else "overall"
        return torch.tensor([score[read] >= self._algorithm.correct_threshold for score in scores])

    def _decoded(self, response_ids: Sequence[int]) -> str:
        return self._processing.decode(response_ids, skip_special_tokens=self._worker.reward.skip_special_tokens)


def request(problem: Problem, prompt: EncodedPrompt, seed: int, tokens: Sequence[int] = ()) -> GenerationRequest:
    """Returns the engine's request to continue a prompt, or a prompt and the first `tokens` of a response."""
    return GenerationRequest(
        prompt_ids=(*prompt.engine_ids, *tokens),
        num_prompt_tokens=len(prompt.token_ids) + len(tokens),
        images=problem.images,
        videos=problem.videos,
        seed=seed,
        image_source=problem.image_source,
    )


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


def validation_settings(rollout: RolloutConfig, data: DataConfig) -> SamplingSettings:
    return training_settings(rollout, data, rollout.val_override_config)


def training_settings(rollout: RolloutConfig, data: DataConfig, override: Fields | None = None) -> SamplingSettings:
    """Returns the sampling settings of `worker.rollout`; `override` replaces some."""
    chosen = {name: getattr(rollout, name) for name in ("n", "temperature", "top_p", "top_k")} | dict(override or {})
    return SamplingSettings(
        num_samples=chosen.pop("n"),
        max_response_length=data.max_response_length,
        ignore_eos=rollout.ignore_eos,
        **chosen,
    )


def reward_input(problem: Problem, response: str, response_length: int, with_images: bool = False) -> Tree:
    """Returns the reward function's input: EasyR1's three fields, the prompt, and the problem's other columns.

    With `with_images` also `images` as the model sees them, and `videos`, the chosen frames of each: (frames, height,
    width, 3) uint8 in RGB. A column under a name of `TRAINERS_NAMES` is left out.
    """
    given: TrainersFields = {
        "response": response,
        "response_length": response_length,
        "ground_truth": problem.ground_truth,
        "prompt": problem.text,
    }
    if with_images:
        given["images"] = list(problem.images)
        given["videos"] = [video.frames for video in problem.videos]
    return sample_of(problem.columns, given)
