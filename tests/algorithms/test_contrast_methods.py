"""The methods that contrast the right answer with several wrong ones, and the image with its absence."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from factories import group, log_probs_like, rollout, same_bits, token_batch
from torch import Tensor

from cepo.algorithms import build_estimator
from cepo.types import Reference, Rollout, TokenBatch

REWARDS = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
IDS = [0] * 4 + [1] * 4
RIGHT = rollout(0, 1.0, "70", correct=True)


def wrong(index: int, answer: str | None, reward: float = 0.0, value: str | None = None) -> Rollout:
    return dataclasses.replace(rollout(index, reward, answer), answer_value=value)


def batch_with(old: Tensor, views: dict[str, Tensor], has: dict[str, list[bool]] | None = None) -> TokenBatch:
    batch = token_batch(REWARDS, IDS, lengths=[5, 3, 1, 4, 2, 5, 5, 1], old=old, views=views)
    shown = {name: torch.tensor(rows) for name, rows in (has or {}).items()}
    return dataclasses.replace(batch, has_reference={**batch.has_reference, **shown})


def test_a_rollout_reads_other_rollouts_wrong_answers_alone() -> None:
    """Lowest reward first; 3 and 3.0 have one value and count once; None stands where there is no further one."""
    these = group(RIGHT, wrong(1, "3", value="3"), wrong(2, "5", 0.1), wrong(3, "3.0", 0.1, value="3"), wrong(4, None))
    found = build_estimator("rlcsd", {"num_wrong": 2}).references(these)
    three, five = Reference(text="3", source_index=1), Reference(text="5", source_index=2)
    assert found["wrong_1"] == [three, five, three, three, three]
    assert found["wrong_2"] == [five, Reference(text="3.0", source_index=3), None, five, five]
    assert {one.text for one in found["correct"] if one is not None} == {"70"}


@pytest.mark.parametrize("select", ["lowest_reward", "random", "most_frequent"])
def test_the_first_wrong_reference_is_cepos_choice(select: str) -> None:
    these = group(RIGHT, *(wrong(index, answer) for index, answer in enumerate("34535", start=1)))
    chosen = {
        name: build_estimator(name, {"negative": {"select": select}}).references(these) for name in ("rlcsd", "cepo")
    }
    assert chosen["rlcsd"]["wrong_1"][0] == chosen["cepo"]["wrong"][0]


def test_the_wrong_side_is_the_mean_of_the_probabilities_shown() -> None:
    """Row 1 reads two of three wrong references, so its mean is (0.5 + 0.125) / 2."""
    old, correct = torch.full((8, 5), math.log(0.3)), torch.full((8, 5), math.log(0.25))
    views = {
        f"wrong_{place}": torch.full((8, 5), math.log(chance)) for place, chance in ((1, 0.5), (2, 0.1), (3, 0.125))
    }
    has = {"wrong_2": [True, False] + [True] * 6}
    batch = batch_with(old, {"correct": correct, **views}, has)
    found = build_estimator("rlcsd", {"num_wrong": 3}).signal(batch, step=0).diagnostics["delta"][:2, 0].tolist()
    means = [(0.5 + 0.1 + 0.125) / 3, (0.5 + 0.125) / 2]
    assert found == pytest.approx([math.log(0.25 / mean) for mean in means], rel=1e-6)


def test_one_wrong_reference_is_cepo_and_none_is_rlsd() -> None:
    old, correct, first, second = (tensor.float() for tensor in log_probs_like((4, 8, 5), seed=2))

    def advantages(name: str, views: dict[str, Tensor], **has: list[bool]) -> Tensor:
        settings = {"num_wrong": len(views) - 1} if name == "rlcsd" else {}
        return build_estimator(name, settings).signal(batch_with(old, views, has), step=3).advantages

    two, yes, no = {"correct": correct, "wrong_1": first, "wrong_2": old}, [True] * 8, [False] * 8
    expected = advantages("cepo", {"correct": correct, "wrong": first})
    assert same_bits(advantages("rlcsd", two, wrong_1=yes, wrong_2=no), expected)
    assert not same_bits(advantages("rlcsd", {"correct": correct, "wrong_1": second}), expected)
    none = advantages("rlcsd", two | {"wrong_1": old}, wrong_1=no, wrong_2=no)
    assert same_bits(none, advantages("rlsd", {"correct": correct}))


def test_sides_that_cannot_be_shown_leave_the_others() -> None:
    """Without a right side no wrong one stays; without any wrong side `fallback` decides."""
    shown = {"correct": [True, False, True], "wrong_1": [False, True, False], "wrong_2": [True, True, False]}
    settings = {"num_wrong": 2}
    assert build_estimator("rlcsd", settings).settled(shown) == {
        "correct": [True, False, True], "wrong_1": [False, False, False], "wrong_2": [True, False, False],
    }  # fmt: skip
    neutral = build_estimator("rlcsd", {**settings, "negative": {"fallback": "neutral"}}).settled(shown)
    assert neutral["correct"] == [True, False, False]


def test_visual_evidence_is_the_student_less_the_blind_policy() -> None:
    """A right rollout's token of delta log 1.2 has weight 1.2, a wrong one's 1 / 1.2; lambda is 1."""
    old, blind = torch.full((8, 5), math.log(0.6)), torch.full((8, 5), math.log(0.5))
    estimator = build_estimator("visual", {"weight": {"lambda_init": 1.0}})
    diagnostics = estimator.signal(batch_with(old, {"blind": blind}), step=0).diagnostics
    assert float(diagnostics["delta"][0, 0]) == pytest.approx(math.log(1.2), rel=1e-6)
    assert diagnostics["weight"][:2, 0].tolist() == pytest.approx([1.2, 1 / 1.2], rel=1e-6)
    assert estimator.references(group(RIGHT, wrong(1, "3"))) == {"blind": [Reference(blind=True)] * 2}


def test_evidence_can_be_limited_to_groups_with_both_verdicts() -> None:
    """The second group has one right rollout; under a reward for format the first has none, but differing rewards."""
    old, correct, wrong_view = log_probs_like((3, 8, 5), seed=4)
    rewards = [0.1, 0.0, 0.0, 0.1, 1.0, 0.0, 0.0, 0.1]
    views = {"correct": correct, "wrong": wrong_view}
    batch = token_batch(rewards, IDS, lengths=[5] * 8, old=old, views=views, dtype=torch.float64)
    methods = (("grpo", {}), ("cepo", {}), ("cepo", {"weight": {"mixed_groups_only": True}}))
    plain, everywhere, limited = (build_estimator(*each).signal(batch, step=0).advantages for each in methods)
    assert same_bits(limited[:4], plain[:4])
    assert not same_bits(everywhere[:4], plain[:4])
    assert same_bits(limited[4:], everywhere[4:])
