"""What the choice of references is given: extracted answers, the grader's judgement of them, responses without end tokens."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from factories import rollouts_of

from cepo.algorithms.references import wrong_candidates, wrong_reference
from cepo.algorithms.settings import NegativeConfig
from cepo.config.worker_schema import RewardConfig
from cepo.data.dataset import Problem
from cepo.rewards.pool import RewardPool
from cepo.trainer.planning import rollout_groups
from cepo.types import RolloutGroup

END, STOP = 90, 91


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(RewardConfig()) as opened:
        yield opened


def group_of(
    pool: RewardPool,
    truth: str,
    responses: list[tuple[str, bool]],
    *,
    ids: list[tuple[int, ...]] | None = None,
    with_values: bool = False,
) -> RolloutGroup:
    """One group of responses with the verifier's verdict on each."""
    texts, right = zip(*responses, strict=True)
    problem = Problem(prompt_id="0", text="?", images=(), ground_truth=truth, solution=None, columns={})
    tokens = ids or [(1, 2, END)] * len(responses)
    rollouts = rollouts_of(tokens, [*map(float, right)], step=3, problems=[problem], responses=texts)
    processing = SimpleNamespace(special_texts=["<|im_end|>"], eos_token_ids=(END, STOP))
    (group,) = rollout_groups(rollouts, pool, cast("Any", processing), seed=7, with_values=with_values)
    return group


def test_an_answer_equal_to_the_truth_is_no_wrong_reference(pool: RewardPool) -> None:
    # A stricter verifier than the grader, one that wants another format or a proof.
    group = group_of(pool, "0.5", [(r"\boxed{0.5}", True), (r"\boxed{1/2}", False), (r"\boxed{3}", False)])
    assert [rollout.answer_equals_ground_truth for rollout in group.rollouts] == [True, True, False]
    assert [rollout.answer for rollout in wrong_candidates(group, NegativeConfig())] == ["3"]
    chosen = wrong_reference(group, NegativeConfig())
    assert chosen is not None
    assert (chosen.text, chosen.source_index) == ("3", 2)


def test_a_rounding_of_the_truth_is_no_wrong_reference(pool: RewardPool) -> None:
    answers = ["8.66", "8.7", "8.6", "9", "10"]
    group = group_of(pool, r"5 \sqrt { 3 }", [(rf"\boxed{{{answer}}}", False) for answer in answers])
    assert [rollout.answer for rollout in wrong_candidates(group, NegativeConfig())] == ["10"]
    whole = group_of(pool, "100", [(rf"\boxed{{{answer}}}", False) for answer in ("101", "99", "100.4")])
    assert [rollout.answer for rollout in wrong_candidates(whole, NegativeConfig())] == ["101", "99"]


def test_the_most_frequent_answer_is_counted_by_value(pool: RewardPool) -> None:
    """0.5 is written in three ways and 7 twice alike: by spelling 7 is the most frequent, by value 0.5."""
    answers = ["7", "7", r"\frac{1}{2}", "0.5", r"50\%"]
    responses = [(rf"\boxed{{{answer}}}", False) for answer in answers]
    chosen = wrong_reference(group_of(pool, "3", responses, with_values=True), NegativeConfig(select="most_frequent"))
    assert chosen is not None
    assert (chosen.text, chosen.source_index) == (r"\frac{1}{2}", 2)


def test_a_response_without_an_answer_is_wrong_and_no_candidate(pool: RewardPool) -> None:
    """Peers see responses without their end tokens."""
    responses = [("no idea", False), (r"\boxed{<|im_end|>}", False), (r"\boxed{6}", False), (r"\boxed{5}", True)]
    group = group_of(pool, "5", responses, ids=[(4, 5, 6), (1, 2, END), (1, END), (3, STOP, END)])
    assert [rollout.answer for rollout in group.rollouts] == [None, None, "6", "5"]
    assert [rollout.index for rollout in wrong_candidates(group, NegativeConfig())] == [2]
    assert [rollout.response_ids for rollout in group.rollouts] == [(4, 5, 6), (1, 2), (1,), (3,)]
    assert (group.seed, group.step, group.prompt_id) == (7, 3, "0")
