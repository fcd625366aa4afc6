"""Defines recorded responses of any trainer, with what its files say of them, and their groups."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedResponse:
    """One sampled response as a trainer's files have it; what they lack is None.

    Attributes:
        step: the training step; 0 if the files have none.
        group: what the responses to one prompt in one step have in common.
        parts: the scores of several reward functions, by name, whose sum is the reward.
        right: whether the answer is right.
        finished: False if the length limit cut the response.
        length: in tokens, or in characters if the file has no tokens.
        gap: mean of |log P_sampler - log P_trainer| of its tokens, in nats.
        surprise: mean of -log P_sampler of its tokens, in nats.
        images: names of the files with the images of its problem, or data URIs.
    """

    step: int
    group: str
    prompt: str
    response: str
    reward: float
    length: int
    ground_truth: str = ""
    right: bool | None = None
    finished: bool | None = None
    gap: float | None = None
    surprise: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    images: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseGroup:
    """All recorded responses to one prompt in one step."""

    responses: Sequence[RecordedResponse]

    @property
    def step(self) -> int:
        return self.responses[0].step

    @property
    def is_dead(self) -> bool:
        """Whether all rewards are equal, so that a method that compares the responses of a group learns nothing."""
        rewards = [response.reward for response in self.responses]
        return max(rewards) == min(rewards)

    @property
    def num_right(self) -> int:
        return sum(response.right is True for response in self.responses)

    @property
    def state(self) -> str:
        if not self.is_dead:
            return "mixed"
        if self.num_right == len(self.responses):
            return "dead: all right"
        return "dead: all wrong" if self.num_right == 0 else "dead: equal rewards"


def shortened(text: str, longest: int = 8_000) -> str:
    """Returns of a text with more than so many characters the beginning and the end."""
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]}\n[…]\n{text[-half:]}"


def groups_of(responses: Iterable[RecordedResponse]) -> list[ResponseGroup]:
    """Returns the groups of responses, in the order of their first ones."""
    members: dict[tuple[int, str], list[RecordedResponse]] = collections.defaultdict(list)
    for response in responses:
        members[response.step, response.group].append(response)
    return [ResponseGroup(responses=group) for group in members.values()]


def by_step(groups: Sequence[ResponseGroup]) -> dict[int, list[ResponseGroup]]:
    """Returns the groups of each step, oldest first."""
    steps: dict[int, list[ResponseGroup]] = collections.defaultdict(list)
    for group in groups:
        steps[group.step].append(group)
    return dict(sorted(steps.items()))


def derived_metrics(groups: Sequence[ResponseGroup]) -> dict[str, dict[int, float]]:
    """Returns by name and step what the responses say themselves, under the names of a run's metrics."""
    metrics: dict[str, dict[int, float]] = collections.defaultdict(dict)
    for step, groups_of_step in by_step(groups).items():
        responses = [response for group in groups_of_step for response in group.responses]
        rewards = [response.reward for response in responses]
        lengths = [response.length for response in responses]
        metrics["reward/mean"][step] = statistics.fmean(rewards)
        metrics["reward/std"][step] = statistics.pstdev(rewards)
        metrics["response_length/mean"][step] = statistics.fmean(lengths)
        metrics["response_length/min"][step] = min(lengths)
        metrics["response_length/max"][step] = max(lengths)
        sized = [group for group in groups_of_step if len(group.responses) > 1]
        if sized:
            for name, state in _STATES.items():
                metrics[name][step] = sum(group.state == state for group in sized) / len(sized)
        measured = {
            "reward/correct": [float(response.right) for response in responses if response.right is not None],
            "response_length/clip_ratio": [
                not response.finished for response in responses if response.finished is not None
            ],
            "rollout/log_prob_gap_mean": [response.gap for response in responses if response.gap is not None],
            "rollout/entropy": [response.surprise for response in responses if response.surprise is not None],
        }
        names_of_parts = {name for response in responses for name in response.parts}
        for name in names_of_parts if len(names_of_parts) > 1 else ():
            own_values = [response.parts[name] for response in responses if name in response.parts]
            measured.setdefault(f"reward/{name}", own_values)
        for name, values in measured.items():
            if values:
                metrics[name].setdefault(step, statistics.fmean(values))
    return dict(metrics)


_STATES = {"groups/mixed": "mixed", "groups/all_right": "dead: all right", "groups/all_wrong": "dead: all wrong"}
