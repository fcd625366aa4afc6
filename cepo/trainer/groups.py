"""Describes rollouts by prompt, as methods choose references among them."""

from __future__ import annotations

from collections.abc import Sequence

from cepo.algorithms.references import wrong_reference, wrong_rollouts
from cepo.algorithms.settings import NegativeConfig
from cepo.data.contexts import sanitise_reference
from cepo.metrics import Metrics, fraction
from cepo.models.processing import Processing
from cepo.rewards.pool import RewardPool
from cepo.trainer.rollouts import Rollouts
from cepo.types import Rollout, RolloutGroup


def rollout_groups(
    rollouts: Rollouts, pool: RewardPool, processing: Processing, *, seed: int, with_values: bool = False
) -> list[RolloutGroup]:
    """Returns the rollouts' groups with their final answers, from which methods choose references.

    The grader compares answers of wrong responses with the ground truth: a rounding of the truth, for example, must not
    be shown to a teacher as wrong. Answers are sanitised here, so that one that becomes empty is no candidate. With
    `with_values`, wrong answers get the value by which `negative.select=most_frequent` counts them.
    """
    extracted = pool.extracted_answers(rollouts.responses)
    answers = [sanitise_reference(answer or "", processing.special_texts) or None for answer in extracted]
    doubtful = {row: answer for row, answer in enumerate(answers) if answer is not None and not rollouts.correct[row]}
    truths = [rollouts.problems[row // rollouts.group_size].ground_truth for row in doubtful]
    equal = dict(zip(doubtful, pool.same_statements([*zip(doubtful.values(), truths, strict=True)]), strict=True))
    values = dict(zip(doubtful, pool.value_keys([*doubtful.values()]), strict=True)) if with_values else {}

    def candidate(index: int, row: int) -> Rollout:
        response = rollouts.generations[row].response_ids
        return Rollout(
            index=index,
            reward=float(rollouts.rewards[row]),
            correct=bool(rollouts.correct[row]),
            response_ids=tuple(token for token in response if token not in processing.eos_token_ids),
            answer=answers[row],
            answer_equals_ground_truth=equal.get(row, bool(rollouts.correct[row])),
            answer_value=values.get(row),
        )

    return [
        RolloutGroup(
            prompt_id=problem.prompt_id,
            ground_truth=problem.ground_truth,
            rollouts=[candidate(index, row) for index, row in enumerate(rollouts.rows_of(number))],
            seed=seed,
            step=rollouts.step,
            solution=problem.solution,
        )
        for number, problem in enumerate(rollouts.problems)
    ]


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
