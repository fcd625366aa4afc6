"""Which rollout of a group gives a reference; trainer/test_references_fuzz.py has what holds for any group."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from factories import group, rollout, settled_references

from cepo.algorithms import build_estimator
from cepo.algorithms.references import positive_references
from cepo.algorithms.settings import NegativeConfig, PositiveConfig
from cepo.errors import ConfigError
from cepo.metrics import fraction
from cepo.trainer.rollout_groups import reference_metrics
from cepo.types import ImageReference, Reference, RolloutGroup, TextReference, TokenReference

TRUTH = TextReference(text="70")
RIGHT = rollout(0, 1.0, "70", correct=True)
wrong = rollout


def pick(
    prompt_group: RolloutGroup, positive: Any = None, **negative: Any
) -> tuple[Reference | None, Reference | None]:
    """The two references of the group, after checking that all its rollouts share them."""
    settings = {"positive": positive or {}, "negative": negative, "weight": {"lambda_schedule": "constant"}}
    correct, against = settled_references(build_estimator("cepo", settings), prompt_group).values()
    assert len(correct) == len(against) == len(prompt_group.rollouts)
    assert len(set(correct)) == len(set(against)) == 1
    return correct[0], against[0]


MIXED = group(RIGHT, wrong(1, 0.1, "40"), wrong(2, 0.0, "50"), wrong(3, 0.1, "40"))
TIED = group(RIGHT, wrong(1, 0.0, "41"), wrong(2, 0.0, "42"), wrong(3, 0.0, "43"))
UNBOXED_LOWEST = group(RIGHT, wrong(1, 0.1, "40"), wrong(2, 0.0, None))
ALL_RIGHT = group(RIGHT, rollout(1, 1.0, "70", correct=True))
ALL_WRONG = group(wrong(0, 0.1, "40"), wrong(1, 0.0, "50"))
NOTHING_EXTRACTABLE = group(RIGHT, wrong(1, 0.0, None), wrong(2, 0.0, None))
OTHER_NOTATION = group(RIGHT, wrong(1, 0.0, "70.0", equal=True), wrong(2, 0.1, "35"))
ONLY_OTHER_NOTATION = group(RIGHT, wrong(1, 0.0, "\\frac{140}{2}", equal=True))
ONE_RIGHT = group(RIGHT)
ONE_WRONG = group(wrong(0, 0.0, "40"))
BONUS = group(rollout(0, 0.2, "70", correct=True), wrong(1, 0.9, "40"))


@pytest.mark.parametrize(
    ("prompt_group", "expected"),
    [
        pytest.param(MIXED, [("50", 2), ("40", 1), ("50", 2)], id="mixed: 40 stands twice"),
        pytest.param(TIED, [("41", 1), ("41", 1), ("41", 1)], id="three tied: the lowest index"),
        pytest.param(UNBOXED_LOWEST, [("40", 1), ("40", 1), None], id="the lowest reward has no answer"),
        pytest.param(ALL_RIGHT, [None, None, None], id="all right"),
        pytest.param(ALL_WRONG, [("50", 1), ("40", 0), ("50", 1)], id="all wrong: 50 is lowest, 40 comes first"),
        pytest.param(NOTHING_EXTRACTABLE, [None, None, None], id="nothing extractable"),
        pytest.param(OTHER_NOTATION, [("35", 2), ("35", 2), ("70.0", 1)], id="70.0 equals 70"),
        pytest.param(ONLY_OTHER_NOTATION, [None, None, ("\\frac{140}{2}", 1)], id="only other spellings of the truth"),
        pytest.param(ONE_RIGHT, [None, None, None], id="a single right rollout"),
        pytest.param(ONE_WRONG, [("40", 0)] * 3, id="a single wrong rollout"),
        pytest.param(BONUS, [("40", 1)] * 3, id="a bonus for its format does not make it right"),
    ],
)
def test_table_of_wrong_answers(prompt_group: RolloutGroup, expected: list[tuple[str, int] | None]) -> None:
    """By the lowest reward, by the most frequent answer, and by the lowest reward whatever it says."""
    rules = ({}, {"select": "most_frequent"}, {"strict_lowest": True})
    for rule, entry in zip(rules, expected, strict=True):
        reference = None if entry is None else TextReference(text=entry[0], source_index=entry[1])
        assert pick(prompt_group, **rule) == (TRUTH, reference), rule
        neutral = (None, None) if reference is None else (TRUTH, reference)
        assert pick(prompt_group, fallback="neutral", **rule) == neutral, f"{rule}, neutral fallback"


def test_random_references_are_uniform_and_repeatable() -> None:
    """Three candidates are drawn about 100 times each in 300 steps."""

    def draw(seed: int, step: int, prompt: str) -> Reference | None:
        return pick(group(*TIED.rollouts, seed=seed, step=step, prompt=prompt), select="random")[1]

    drawn = [draw(1, step, "p") for step in range(300)]
    assert drawn == [draw(1, step, "p") for step in range(300)]
    counts = Counter(reference.source_index for reference in drawn if reference is not None)
    assert set(counts) == {1, 2, 3}
    assert all(70 <= count <= 130 for count in counts.values())
    assert drawn != [draw(2, step, "p") for step in range(300)]
    assert drawn != [draw(1, step, "q") for step in range(300)]


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
    assert [prompt_group for prompt_group in groups[1:] if pick(prompt_group, **negative)[1] is None] == unextractable
    metrics = reference_metrics(groups, NegativeConfig(**negative))
    assert metrics["references/groups_without_wrong"] == fraction(1, 5)
    answers = [each.answer for prompt_group in groups for each in prompt_group.rollouts]
    assert metrics["references/responses_without_answer"] == fraction(answers.count(None), len(answers))
    assert metrics["references/groups_wrong_unextractable"] == fraction(len(unextractable), 5)


PEERS = group(
    wrong(0, 0.1, "40", ids=range(100, 110)),
    rollout(1, 0.9, "70", correct=True, ids=range(200, 203)),
    rollout(2, 1.0, "70.0", correct=True, ids=range(300, 310)),
    rollout(3, 1.0, "70", correct=True, ids=range(400, 410)),
    wrong(4, 0.0, None, ids=range(500, 503)),
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
        RIGHT, wrong(1, 0.0, None, ids=(1,)), wrong(2, 0.0, None, ids=(2,)), wrong(3, 0.1, "40", ids=(3,))
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
