"""Samples and rewards rollouts for training, validation and evaluation."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from cepo.config.schema import AlgorithmConfig
from cepo.config.worker_schema import RolloutConfig, WorkerConfig
from cepo.data.prompts import ContextBuilder, Problem
from cepo.errors import RewardError
from cepo.files.trees import Fields, Tree
from cepo.models.interface import EncodedPrompt
from cepo.models.processing import Processing
from cepo.rewards.contract import RewardOutcome
from cepo.rewards.pool import RewardPool
from cepo.rewards.samples import TrainersFields, sample_of
from cepo.rollout.generator import Generation, GenerationRequest, Sampler, SamplingSettings, sampling_seed
from cepo.trainer.rollouts import Rollouts
from cepo.trainer.stage_clock import StageClock

VALIDATION_STEP = -1
"""Step number in the sampling seeds of validation. It is the same at every validation and no training step has it."""


class RolloutSampler:
    """Samples responses to problems, and rewards and judges each group as soon as it is finished."""

    def __init__(
        self,
        worker: WorkerConfig,
        algorithm: AlgorithmConfig,
        contexts: ContextBuilder,
        processing: Processing,
        rewards: RewardPool,
    ) -> None:
        self.contexts = contexts
        self.processing = processing
        self.rewards = rewards
        self._worker = worker
        self._algorithm = algorithm

    def sample(
        self,
        problems: Sequence[Problem],
        engine: Sampler,
        settings: SamplingSettings,
        *,
        step: int,
        attempt: int = 0,
        prompts: Sequence[EncodedPrompt] | None = None,
        clock: StageClock | None = None,
    ) -> Rollouts:
        """Samples and rewards responses in the problems' order; a failed or late reward affects only its response.

        `prompts` are the problems' encoded prompts, if the caller has them; `clock` counts the time and the tokens.

        Finished groups are rewarded while others are still being sampled, so the stage "reward" measures only the time
        that generation does not cover. Sampling seeds depend only on (seed, step, attempt, problem, its occurrence).
        Raises `DataError`: a prompt is too long; `RewardError`: no response of this round or any earlier one got a score.
        """
        clock = clock or StageClock()
        responses: dict[int, list[str]] = {}
        with self.rewards.stream() as stream:

            def begin(index: int, group: Sequence[Generation]) -> None:
                texts: list[str] = []
                inputs: list[Tree] = []
                for generation in group:
                    text = self._text(generation)
                    texts.append(text)
                    inputs.append(self._input(problems[index], text, len(generation.response_ids)))
                responses[index] = texts
                stream.add(index, inputs)

            with clock.stage("generate"):
                if prompts is None:
                    prompts = [self.contexts.student(problem) for problem in problems]
                requests = self._requests(problems, prompts, step=step, attempt=attempt)
                groups = engine.generate(requests, settings, begin)
            generations = [generation for group in groups for generation in group]
            clock.count_tokens("generate", sum(len(generation.response_ids) for generation in generations))
            with clock.stage("reward"):
                for index, group in enumerate(groups):
                    if index not in stream:  # not every sampler reports finished groups
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

    def _requests(
        self, problems: Sequence[Problem], prompts: Sequence[EncodedPrompt], *, step: int, attempt: int
    ) -> list[GenerationRequest]:
        """Returns a request for each prompt; further copies of a problem in a round have seeds of their own."""
        requests: list[GenerationRequest] = []
        num_copies: Counter[str] = Counter()
        for problem, prompt in zip(problems, prompts, strict=True):
            copy = num_copies[problem.prompt_id]
            num_copies[problem.prompt_id] += 1
            name = f"{problem.prompt_id}#{copy}" if copy else problem.prompt_id
            seed = sampling_seed(self._worker.rollout.seed, step, name, attempt=attempt)
            requests.append(request(problem, prompt, seed))
        return requests

    def with_baselines(
        self, rollouts: Rollouts, engine: Sampler, settings: SamplingSettings, clock: StageClock | None = None
    ) -> Rollouts:
        """Returns the rollouts with each prompt's greedy response rewarded as a baseline; raises as `sample` does."""
        greedy = dataclasses.replace(settings, num_samples=1, temperature=0.0)
        answered = self.sample(
            rollouts.problems, engine, greedy, step=rollouts.step, prompts=rollouts.prompts, clock=clock
        )
        return dataclasses.replace(rollouts, reward_baselines=answered.rewards.repeat_interleave(rollouts.group_size))

    def answers(self, rollouts: Rollouts) -> list[str | None]:
        return self.rewards.extracted_answers(rollouts.responses)

    def verdicts(self, responses: Sequence[tuple[Problem, Sequence[int]]]) -> Tensor:
        """Rewards given responses' tokens and returns (B,) whether each is right; raises `RewardError` as `sample` does."""
        inputs = [self._input(problem, self._decoded(tokens), len(tokens)) for problem, tokens in responses]
        return self._correct(self.rewards.score(inputs))

    def _input(self, problem: Problem, text: str, num_tokens: int) -> Tree:
        judged = self.processing.prefilled + text  # the `<think>` of a template is a part of what it began
        return reward_input(problem, judged, num_tokens, self.rewards.needs_images)

    def _correct(self, outcome: RewardOutcome) -> Tensor:
        """Returns (B,) whether `correct_key` of each score, or the total reward without such a field, is high enough."""
        self.rewards.require_a_score(outcome)
        key = self._algorithm.correct_key
        scores = outcome.scores
        num_present = sum(key in score for score in scores)
        if 0 < num_present < len(scores):
            raise RewardError(
                f"algorithm.correct_key '{key}' is in only {num_present} of {len(scores)} reward results; "
                "a reward function must return it for every response or for none"
            )
        decisive_key = key if num_present else "overall"
        if decisive_key != "overall":  # the total reward may have any scale
            self.rewards.report_percents(decisive_key, scores, self._algorithm.correct_threshold)
        return torch.tensor([score[decisive_key] >= self._algorithm.correct_threshold for score in scores])

    def _text(self, generation: Generation) -> str:
        """Returns a response's text, which the ranks of a run have decoded."""
        if generation.text is not None:
            return generation.text
        return self._decoded(generation.response_ids.tolist())

    def _decoded(self, response_ids: Sequence[int]) -> str:
        return self.processing.decode(response_ids, skip_special_tokens=self._worker.reward.skip_special_tokens)


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


def validation_settings(rollout: RolloutConfig, max_response_length: int) -> SamplingSettings:
    return training_settings(rollout, max_response_length, rollout.val_override_config)


def training_settings(
    rollout: RolloutConfig, max_response_length: int, override: Fields | None = None
) -> SamplingSettings:
    """Returns the sampling settings of `worker.rollout`; `override` replaces some."""
    settings: Tree = {
        "n": rollout.n,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
    }
    settings |= override or {}
    return SamplingSettings(
        num_samples=settings.pop("n"),
        max_response_length=max_response_length,
        ignore_eos=rollout.ignore_eos,
        **settings,
    )


def reward_input(problem: Problem, response: str, response_length: int, with_images: bool = False) -> Tree:
    """Returns the reward function's input: EasyR1's three fields, the prompt, and the problem's other columns.

    With `with_images` also `images` as the model sees them, and `videos`, the chosen frames of each: (frames, height,
    width, 3) uint8 in RGB. A column under a name of `TRAINERS_NAMES` is left out.
    """
    fields: TrainersFields = {
        "response": response,
        "response_length": response_length,
        "ground_truth": problem.ground_truth,
        "prompt": problem.text,
    }
    if with_images:
        fields["images"] = list(problem.images)
        fields["videos"] = [video.frames for video in problem.videos]
    return sample_of(problem.columns, fields)
