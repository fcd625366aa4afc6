"""Which rollout of a group gives a reference; trainer/test_references_fuzz.py has what holds for any group."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from case_files import cases
from factories import group, rollout, settled_references

from cepo.algorithms import build_estimator
from cepo.algorithms.references import positive_references
from cepo.algorithms.settings import NegativeConfig, PositiveConfig
from cepo.errors import ConfigError
from cepo.metrics import fraction
from cepo.trainer.rollout_groups import reference_metrics
from cepo.types import ImageReference, Reference, Rollout, RolloutGroup, TextReference, TokenReference

TRUTH = TextReference(text="70")
WRONG_ANSWERS: dict[str, dict[str, Any]] = cases(__file__, "wrong_answers.yaml")
RULES: dict[str, dict[str, Any]] = {
    "lowest_reward": {},
    "most_frequent": {"select": "most_frequent"},
    "strict_lowest": {"strict_lowest": True},
}


def pick(
    prompt_group: RolloutGroup, positive: Any = None, **negative: Any
) -> tuple[Reference | None, Reference | None]:
    """The two references of the group, after checking that all its rollouts share them."""
    settings = {"positive": positive or {}, "negative": negative, "weight": {"lambda_schedule": "constant"}}
    correct, against = settled_references(build_estimator("cepo", settings), prompt_group).values()
    assert len(correct) == len(against) == len(prompt_group.rollouts)
    assert len(set(correct)) == len(set(against)) == 1
    return correct[0], against[0]


def group_of(case: str) -> RolloutGroup:
    rollouts: list[Rollout] = []
    for index, (reward, answer, *verdict) in enumerate(WRONG_ANSWERS[case]["rollouts"]):
        is_right = verdict == ["right"]
        equals_truth = is_right or verdict == ["equal"]
        rollouts.append(rollout(index, float(reward), answer, correct=is_right, equal=equals_truth))
    return group(*rollouts)


MIXED = group_of("mixed, 40 stands twice")
TIED = group_of("three tied, the lowest index")
UNBOXED_LOWEST = group_of("the lowest reward has no answer")
ALL_RIGHT = group_of("all right")
NOTHING_EXTRACTABLE = group_of("nothing extractable")
ONLY_OTHER_NOTATION = group_of("only other spellings of the truth")


@pytest.mark.parametrize("case", WRONG_ANSWERS)
@pytest.mark.parametrize("rule", RULES)
def test_table_of_wrong_answers(case: str, rule: str) -> None:
    """Without one the right answer is contrasted with the student, or by `fallback: neutral` not at all."""
    prompt_group = group_of(case)
    expected = WRONG_ANSWERS[case][rule]
    if expected is None:
        assert pick(prompt_group, **RULES[rule]) == (TRUTH, None)
        assert pick(prompt_group, fallback="neutral", **RULES[rule]) == (None, None)
    else:
        answer, place = expected
        pair = (TRUTH, TextReference(text=answer, source_index=place))
        assert pick(prompt_group, **RULES[rule]) == pair
        assert pick(prompt_group, fallback="neutral", **RULES[rule]) == pair


def test_random_references_are_uniform_and_repeatable() -> None:
    """Three candidates are drawn about 100 times each in 300 steps."""

    def sources(seed: int, prompt: str) -> list[int | None]:
        drawn: list[int | None] = []
        for step in range(300):
            _, against = pick(group(*TIED.rollouts, seed=seed, step=step, prompt=prompt), select="random")
            assert against is not None
            drawn.append(against.source_index)
        return drawn

    drawn = sources(seed=1, prompt="p")
    counts = Counter(drawn)
    assert set(counts) == {1, 2, 3}
    assert min(counts.values()) >= 70
    assert max(counts.values()) <= 130
    assert drawn == sources(seed=1, prompt="p")
    assert drawn != sources(seed=2, prompt="p")
    assert drawn != sources(seed=1, prompt="q")


@pytest.mark.parametrize(
    ("negative", "unextractable"),
    [
        ({}, [NOTHING_EXTRACTABLE, ONLY_OTHER_NOTATION]),
        ({"strict_lowest": True}, [UNBOXED_LOWEST, NOTHING_EXTRACTABLE]),
        ({"source": "peer_full"}, [ONLY_OTHER_NOTATION]),
        ({"source": "ground_truth"}, []),
    ],
    ids=["answers", "strict", "responses", "truth"],
)
def test_only_groups_that_show_no_answer_count_as_unextractable(
    negative: dict[str, Any], unextractable: list[RolloutGroup]
) -> None:
    """Of 5 groups one is without wrong rollouts."""
    groups = [ALL_RIGHT, MIXED, UNBOXED_LOWEST, NOTHING_EXTRACTABLE, ONLY_OTHER_NOTATION]
    without_reference: list[RolloutGroup] = []
    for prompt_group in groups[1:]:
        _, against = pick(prompt_group, **negative)
        if against is None:
            without_reference.append(prompt_group)
    assert without_reference == unextractable
    metrics = reference_metrics(groups, NegativeConfig(**negative))
    assert metrics["references/groups_without_wrong"] == fraction(1, 5)
    assert metrics["references/responses_without_answer"] == fraction(3, 14)
    assert metrics["references/groups_wrong_unextractable"] == fraction(len(unextractable), 5)


PEERS = group(
    rollout(0, 0.1, "40", ids=range(100, 110)),
    rollout(1, 0.9, "70", correct=True, ids=range(200, 203)),
    rollout(2, 1.0, "70.0", correct=True, ids=range(300, 310)),
    rollout(3, 1.0, "70", correct=True, ids=range(400, 410)),
    rollout(4, 0.0, None, ids=range(500, 503)),
)


LAST = TokenReference(token_ids=(500, 501, 502), source_index=4)
"""A text needs no extractable answer; 3 tokens are fewer than the 4 asked for and are used whole."""


@pytest.mark.parametrize(
    ("source", "right", "against"),
    [
        ("ground_truth", TRUTH, TRUTH),
        ("peer_answer", TextReference(text="70.0", source_index=2), TextReference(text="40", source_index=0)),
        ("peer_full", TokenReference(token_ids=tuple(range(300, 310)), source_index=2), LAST),
        ("peer_prefix", TokenReference(token_ids=(300, 301, 302, 303), source_index=2), LAST),
        ("peer_suffix", TokenReference(token_ids=(306, 307, 308, 309), source_index=2), LAST),
    ],
)
def test_each_side_comes_from_its_best_peer_of_lowest_index(source: str, right: Reference, against: Reference) -> None:
    assert positive_references(PEERS, PositiveConfig(source=source, num_tokens=4)) == [right] * 5
    assert pick(PEERS, source=source, num_tokens=4) == (TRUTH, against)


def test_missing_answers_are_not_the_most_frequent_answer() -> None:
    prompt_group = group(
        rollout(0, 1.0, "70", correct=True),
        rollout(1, 0.0, None, ids=(1,)),
        rollout(2, 0.0, None, ids=(2,)),
        rollout(3, 0.1, "40", ids=(3,)),
    )
    chosen = pick(prompt_group, source="peer_full", select="most_frequent")[1]
    assert chosen == TokenReference(token_ids=(3,), source_index=3)


def test_the_base_class_of_references_names_its_three_kinds() -> None:
    """Up to version 0.4 a method wrote `Reference(text=...)` or `Reference(blind=True)`."""
    with pytest.raises(ConfigError, match=r"Reference\(blind\) is a base class; write TextReference\(text=\.\.\.\)"):
        Reference(blind=True)


@pytest.mark.parametrize("probability", [0.0, -0.5, 1.5])
def test_a_mask_blackens_patches_with_a_probability(probability: float) -> None:
    with pytest.raises(AssertionError, match="masked is a probability above 0, got"):
        ImageReference(masked=probability)
    assert ImageReference(masked=1.0).masked == 1.0
