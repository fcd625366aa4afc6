"""Describes rollouts by prompt, as methods choose references among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch

from cepo.algorithms.references import wrong_reference, wrong_rollouts
from cepo.algorithms.settings import NegativeConfig
from cepo.data.batch import TokenIds, token_array
from cepo.data.prompts import sanitise_reference
from cepo.metrics import Metrics, fraction
from cepo.models.text_codec import TextCodec
from cepo.rewards.pool import RewardPool
from cepo.trainer.rollouts import Rollouts
from cepo.types import Rollout, RolloutGroup


@dataclass(frozen=True, kw_only=True)
class PromptResponses:
    """What methods need to know of the responses to one prompt, in generation order."""

    prompt_id: str
    ground_truth: str
    solution: str | None  # worked, of the dataset
    responses: Sequence[str]
    response_ids: Sequence[TokenIds]
    rewards: Sequence[float]
    correct: Sequence[bool]


def rollout_groups(
    rollouts: Rollouts, pool: RewardPool, codec: TextCodec, *, seed: int, with_values: bool = False
) -> list[RolloutGroup]:
    """Returns the groups of a step's rollouts; see `described_groups`."""
    prompts: list[PromptResponses] = []
    for number, problem in enumerate(rollouts.problems):
        rows = rollouts.rows_of(number)
        prompts.append(
            PromptResponses(
                prompt_id=problem.prompt_id,
                ground_truth=problem.ground_truth,
                solution=problem.solution,
                responses=[rollouts.responses[row] for row in rows],
                response_ids=[rollouts.generations[row].response_ids for row in rows],
                rewards=[float(rollouts.rewards[row]) for row in rows],
                correct=[bool(rollouts.correct[row]) for row in rows],
            )
        )
    return described_groups(prompts, pool, codec, seed=seed, step=rollouts.step, with_values=with_values)


def described_groups(
    prompts: Sequence[PromptResponses],
    pool: RewardPool,
    codec: TextCodec,
    *,
    seed: int,
    step: int,
    with_values: bool = False,
) -> list[RolloutGroup]:
    """Returns the group of each prompt with its final answers, from which methods choose references.

    The grader compares answers of wrong responses with the ground truth: a rounding of the truth, for example, must not
    be shown to a teacher as wrong. Answers are sanitised here, so that one that becomes empty is no candidate. With
    `with_values`, wrong answers get the value by which `negative.select=most_frequent` counts them.
    """
    end_of_turn = token_array(codec.eos_token_ids)
    answers = _final_answers(prompts, pool, codec)
    equals_truth, values = _judged_wrong_answers(prompts, answers, pool, with_values=with_values)
    groups: list[RolloutGroup] = []
    row = 0
    for prompt in prompts:
        candidates: list[Rollout] = []
        for index, response_ids in enumerate(prompt.response_ids):
            candidates.append(
                Rollout(
                    index=index,
                    reward=prompt.rewards[index],
                    correct=prompt.correct[index],
                    response_ids=torch.as_tensor(response_ids[~numpy.isin(response_ids, end_of_turn)]),
                    answer=answers[row],
                    answer_equals_ground_truth=equals_truth.get(row, prompt.correct[index]),
                    answer_value=values.get(row),
                )
            )
            row += 1
        groups.append(
            RolloutGroup(
                prompt_id=prompt.prompt_id,
                ground_truth=prompt.ground_truth,
                rollouts=candidates,
                seed=seed,
                step=step,
                solution=prompt.solution,
            )
        )
    return groups


def _final_answers(prompts: Sequence[PromptResponses], pool: RewardPool, codec: TextCodec) -> list[str | None]:
    """Returns the sanitised answer of each response, one prompt after the other; None where nothing is left of it."""
    responses: list[str] = []
    for prompt in prompts:
        responses += prompt.responses
    extracted = pool.extracted_answers(responses)
    return [sanitise_reference(answer or "", codec.special_texts) or None for answer in extracted]


def _judged_wrong_answers(
    prompts: Sequence[PromptResponses], answers: Sequence[str | None], pool: RewardPool, *, with_values: bool
) -> tuple[dict[int, bool], dict[int, str]]:
    """Returns of the answers of wrong responses, by row, whether each states the ground truth, and its value if asked."""
    correct: list[bool] = []
    truths: list[str] = []
    for prompt in prompts:
        correct += prompt.correct
        truths += [prompt.ground_truth] * len(prompt.responses)
    wrong_answers: dict[int, str] = {}
    for row, answer in enumerate(answers):
        if answer is not None and not correct[row]:
            wrong_answers[row] = answer
    pairs = [(answer, truths[row]) for row, answer in wrong_answers.items()]
    equals_truth = dict(zip(wrong_answers, pool.same_statements(pairs), strict=True))
    values: dict[int, str] = {}
    if with_values:
        values.update(zip(wrong_answers, pool.value_keys(list(wrong_answers.values())), strict=True))
    return equals_truth, values


def reference_metrics(groups: Sequence[RolloutGroup], negative: NegativeConfig) -> Metrics:
    """Returns the shares of responses without answer, and of groups without wrong rollouts or a reference from them."""
    answers = [rollout.answer for group in groups for rollout in group.rollouts]
    wrong = [group for group in groups if wrong_rollouts(group)]
    unextractable = [group for group in wrong if wrong_reference(group, negative) is None]
    return {
        "references/responses_without_answer": fraction(answers.count(None), len(answers)),
        "references/groups_without_wrong": fraction(len(groups) - len(wrong), len(groups)),
        "references/groups_wrong_unextractable": fraction(len(unextractable), len(groups)),
    }
