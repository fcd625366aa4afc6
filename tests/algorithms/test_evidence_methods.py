"""The methods of evidence: their guarantees as properties, what each contrasts, and what the order of rows leaves alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from factories import (
    advantages_of,
    group,
    log_probs_like,
    rollout,
    rows_of_batch,
    same_bits,
    signal_of,
    token_batch,
    weighted_advantages,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cepo.algorithms import build_estimator, statistics
from cepo.types import ImageReference, PromptReference, Reference, Rollout, TextReference, TokenBatch

LARGEST_RADIUS = 1.0 - 2.0**-53
DTYPES = [torch.float32, torch.float64]

radii = st.one_of(
    st.floats(0, LARGEST_RADIUS, allow_subnormal=False),
    st.sampled_from([0.0, 1e-12, 0.2, 0.5, 0.999999, 1.0 - 2.0**-30, LARGEST_RADIUS]),
)
mixings = st.one_of(st.floats(0, 1, allow_subnormal=False), st.sampled_from([0.0, 0.5, 1.0]))
advantage_values = st.one_of(
    st.floats(-5, 5, width=32, allow_subnormal=False), st.sampled_from([0.0, -0.0, 1e-12, -1e-12, 1e-6, -1e-6, 2e-6])
)
deltas = st.one_of(st.floats(-50, 50, width=32), st.sampled_from([0.0, 2e4, -2e4, 1e-7, -1e-7]))


@st.composite
def kernels(draw: st.DrawFn) -> tuple[list[float], list[list[float]]]:
    """Advantages of up to 5 rollouts and a delta for each of up to 6 tokens of each."""
    advantages = draw(st.lists(advantage_values, min_size=1, max_size=5))
    width = draw(st.integers(1, 6))
    rows = [draw(st.lists(deltas, min_size=width, max_size=width)) for _ in advantages]
    return advantages, rows


def tensors(case: tuple[list[float], list[list[float]]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.tensor(case[0], dtype=dtype), torch.tensor(case[1], dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@given(case=kernels(), mixing=mixings, radius=radii)
def test_evidence_keeps_the_sign_and_moves_by_at_most_lambda_r(
    dtype: torch.dtype, case: tuple[list[float], list[list[float]]], mixing: float, radius: float
) -> None:
    """For lambda = 0, for r = 0 and for delta = 0 it is the plain advantage, bit for bit."""
    advantages, delta = tensors(case, dtype)
    plain = advantages.unsqueeze(1).expand_as(delta).contiguous()

    weighted = weighted_advantages(advantages, delta, mixing=mixing, clip_radius=radius)
    assert weighted.isfinite().all()
    assert torch.equal(weighted.sign(), plain.sign())
    moved = (weighted.double() - plain.double()).abs()
    rounding = 2 * torch.finfo(dtype).eps
    largest_share = mixing * radius * (1 + 1e-6) + rounding
    assert (moved <= largest_share * plain.double().abs()).all()

    without_mixing = weighted_advantages(advantages, delta, mixing=0.0, clip_radius=radius)
    assert same_bits(without_mixing, plain)
    without_radius = weighted_advantages(advantages, delta, mixing=mixing, clip_radius=0.0)
    assert same_bits(without_radius, plain)
    no_evidence = torch.zeros_like(delta)
    without_evidence = weighted_advantages(advantages, no_evidence, mixing=mixing, clip_radius=radius)
    assert same_bits(without_evidence, plain)


@given(st.lists(st.floats(-300, 300), min_size=1, max_size=8), radii, st.sampled_from([-1.0, 1.0]))
def test_the_weight_is_the_exponential_clipped_to_1_plus_minus_r(
    values: list[float], radius: float, sign: float
) -> None:
    """So a delta d moves it by at most exp(|d|) - 1, and unclipped weights before and after a swap multiply to 1."""
    delta = torch.tensor([values], dtype=torch.float64)
    signs = torch.tensor([[sign]], dtype=torch.float64)
    weight = statistics.evidence_weight(delta, signs, clip_radius=radius)
    expected = (sign * delta).exp().clamp(1.0 - radius, 1.0 + radius)
    torch.testing.assert_close(weight, expected, rtol=1e-13, atol=0)


BINARY_REWARDS = [1, 0, 0, 1]
BONUS_REWARDS = [1.0, 0.1, 0.0, 0.1]
FLAT_REWARDS = [0.9, 0.9, 0.9, 0.9]
GROUP_IDS = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
LENGTHS = [6, 4, 1, 5, 6, 6, 2, 3, 4, 5, 6, 1]


def batch_with(
    views: Mapping[str, Tensor], old: Tensor, dtype: torch.dtype, rewards: Sequence[float] | None = None
) -> TokenBatch:
    """Three groups of four: binary rewards, rewards with a format bonus, and one flat group."""
    if rewards is None:
        rewards = [*BINARY_REWARDS, *BONUS_REWARDS, *FLAT_REWARDS]
    return token_batch(rewards, GROUP_IDS, lengths=LENGTHS, old=old, views=views, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["cepo", "rlsd", "rlcsd", "visual", "input_contrast"])
@pytest.mark.parametrize(
    ("config", "step"),
    [({"weight": {"lambda_init": 0.0}}, 0), ({"weight": {"clip_radius": 0.0}}, 0), ({}, 25), ({}, 10_000)],
)
def test_lambda_0_or_radius_0_is_grpo_and_reads_no_teacher(
    name: str, config: dict[str, Any], step: int, dtype: torch.dtype
) -> None:
    old, _, _ = log_probs_like((3, 12, 6), seed=1)
    batch = batch_with({}, old, dtype)
    assert not build_estimator(name, config).needs_teacher(step=step)
    plain = advantages_of("grpo", batch, step=step)
    assert same_bits(advantages_of(name, batch, step=step, **config), plain)
    assert torch.count_nonzero(plain) > 0


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 10_000), mixing=mixings, radius=radii)
def test_equal_views_are_grpo_bit_for_bit(dtype: torch.dtype, seed: int, mixing: float, radius: float) -> None:
    old, teacher, _ = log_probs_like((3, 12, 6), seed)
    without_teachers = batch_with({}, old, dtype)
    equal_teachers = batch_with({"correct": teacher, "wrong": teacher}, old, dtype)
    students_own = batch_with({"correct": old}, old, dtype)

    weight = {"lambda_init": mixing, "clip_radius": radius}
    plain = advantages_of("grpo", without_teachers)
    cepo = advantages_of("cepo", equal_teachers, weight=weight)
    rlsd = advantages_of("rlsd", students_own, weight=weight)
    assert same_bits(cepo, plain)
    assert same_bits(rlsd, plain)


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 10_000), mixing=mixings, radius=radii)
def test_cepo_with_the_student_as_wrong_view_is_rlsd(
    dtype: torch.dtype, seed: int, mixing: float, radius: float
) -> None:
    """The student's log-probs stand in the wrong view's place, and the signals are equal bit for bit."""
    old, correct, _ = log_probs_like((3, 12, 6), seed)
    student_as_wrong = batch_with({"correct": correct, "wrong": old}, old, dtype)
    correct_alone = batch_with({"correct": correct}, old, dtype)

    weight = {"lambda_init": mixing, "clip_radius": radius}
    cepo = signal_of("cepo", student_as_wrong, step=2, weight=weight)
    rlsd = signal_of("rlsd", correct_alone, step=2, weight=weight)
    assert same_bits(cepo.advantages, rlsd.advantages)
    assert cepo.metrics == rlsd.metrics


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 10_000))
def test_swapping_references_and_negating_advantages_cancel(dtype: torch.dtype, seed: int) -> None:
    old, correct, wrong = log_probs_like((3, 12, 6), seed, scale=0.5)
    rewards = [1, 0, 0, 1, 1.0, 0.25, 0.0, 0.25, 1, 0, 0, 0]
    negated_rewards = [-reward for reward in rewards]
    straight_batch = batch_with({"correct": correct, "wrong": wrong}, old, dtype, rewards)
    swapped_batch = batch_with({"correct": wrong, "wrong": correct}, old, dtype, negated_rewards)

    straight = signal_of("cepo", straight_batch)
    swapped = signal_of("cepo", swapped_batch)
    assert same_bits(swapped.diagnostics["weight"], straight.diagnostics["weight"])
    assert torch.equal(swapped.advantages, -straight.advantages)


def mixing_at(step: int, **weight: Any) -> float:
    method: Any = build_estimator("rlsd", {"weight": weight})
    return method.mixing(step)


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        ({}, {0: 0.5, 5: 0.4, 24: 0.02, 25: 0.0, 26: 0.0, 1000: 0.0}),
        ({"lambda_schedule": "constant", "lambda_init": 1.0}, {0: 1.0, 1: 1.0, 99: 1.0}),
        (
            {"lambda_init": 0.8, "lambda_warmup_steps": 4, "lambda_decay_steps": 10},
            {0: 0.2, 1: 0.4, 2: 0.6, 3: 0.8, 4: 0.8, 9: 0.4, 14: 0.0},
        ),
    ],
    ids=["default", "constant", "warm-up"],
)
def test_lambdas_are_those_worked_out_by_hand(weight: dict[str, Any], expected: dict[int, float]) -> None:
    for step, mixing in expected.items():
        assert mixing_at(step, **weight) == pytest.approx(mixing, abs=1e-12)


REWARD_LEVELS = [
    [0.0, 1.0],
    [0.0, 0.1, 0.9, 1.0],
    [0.1, 0.2, 0.3],
    [-1.7, 0.3, 2.9],
]


@st.composite
def batches(draw: st.DrawFn, dtype: torch.dtype) -> TokenBatch:
    group_sizes = draw(st.lists(st.integers(2, 7), min_size=1, max_size=4))
    group_ids: list[int] = []
    for position, size in enumerate(group_sizes):
        group_ids += [11 * position] * size
    rows = len(group_ids)
    levels = st.sampled_from(draw(st.sampled_from(REWARD_LEVELS)))
    rewards = draw(st.lists(levels, min_size=rows, max_size=rows))
    lengths = draw(st.lists(st.integers(1, 5), min_size=rows, max_size=rows))
    seed = draw(st.integers(0, 999))
    old, correct, wrong = log_probs_like((3, rows, 5), seed)
    views = {"correct": correct, "wrong": wrong}
    return token_batch(rewards, group_ids, lengths=lengths, old=old, views=views, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", ["grpo", "rlsd", "cepo", "grpo_passk", "rloo", "remax", "reinforce_plus_plus", "gae", "contrast_gate"]
)
@given(data=st.data())
def test_permuting_rows_permutes_advantages_bit_for_bit(name: str, dtype: torch.dtype, data: st.DataObject) -> None:
    """Those that are whitened over the batch up to rounding."""
    batch = data.draw(batches(dtype))
    rows = range(len(batch.correct))
    order = torch.tensor(data.draw(st.permutations(rows)))
    permuted_batch = rows_of_batch(batch, order)
    expected = advantages_of(name, batch, step=3)[order]
    permuted = advantages_of(name, permuted_batch, step=3)
    torch.testing.assert_close(permuted, expected, rtol=1e-6, atol=1e-7)
    if name not in ("reinforce_plus_plus", "gae"):
        assert same_bits(permuted, expected)


@given(data=st.data())
def test_a_group_alone_or_renamed_keeps_its_bits(data: st.DataObject) -> None:
    batch = data.draw(batches(torch.float32))
    whole = advantages_of("cepo", batch)
    renamed_batch = dataclasses.replace(batch, group_ids=900 - 7 * batch.group_ids)
    renamed = advantages_of("cepo", renamed_batch)
    assert same_bits(renamed, whole)
    for group_id in batch.group_ids.unique():
        (rows,) = torch.nonzero(batch.group_ids == group_id, as_tuple=True)
        alone = advantages_of("cepo", rows_of_batch(batch, rows))
        assert same_bits(alone, whole[rows])


RIGHT = rollout(0, 1.0, "70", correct=True)


def wrong(index: int, answer: str | None, reward: float = 0.0, value: str | None = None) -> Rollout:
    return dataclasses.replace(rollout(index, reward, answer), answer_value=value)


def eight_rows(old: Tensor, views: dict[str, Tensor], **shown: list[bool]) -> TokenBatch:
    """Two groups of four. Every row has a reference for every view unless `shown` says otherwise."""
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    group_ids = [0, 0, 0, 0, 1, 1, 1, 1]
    lengths = [5, 3, 1, 4, 2, 5, 5, 1]
    batch = token_batch(rewards, group_ids, lengths=lengths, old=old, views=views)
    has_reference = dict(batch.has_reference)
    for view, rows in shown.items():
        has_reference[view] = torch.tensor(rows)
    return dataclasses.replace(batch, has_reference=has_reference)


def constant(probability: float) -> Tensor:
    """The log-probs of `eight_rows` where every token has this probability."""
    return torch.full((8, 5), math.log(probability))


def test_a_rollout_reads_other_rollouts_wrong_answers_alone() -> None:
    """Lowest reward first; 3 and 3.0 have one value and count once; None stands where there is no further one."""
    prompt_group = group(
        RIGHT,
        wrong(1, "3", value="3"),
        wrong(2, "5", reward=0.1),
        wrong(3, "3.0", reward=0.1, value="3"),
        wrong(4, None),
    )
    actual = build_estimator("rlcsd", {"num_wrong": 2}).references(prompt_group)
    three = TextReference(text="3", source_index=1)
    five = TextReference(text="5", source_index=2)
    other_three = TextReference(text="3.0", source_index=3)
    assert actual["wrong_1"] == [three, five, three, three, three]
    assert actual["wrong_2"] == [five, other_three, None, five, five]
    assert {reference.text for reference in actual["correct"] if reference is not None} == {"70"}


def test_strict_lowest_looks_at_the_lowest_rewards_alone() -> None:
    """Of the two lowest of the others, one said nothing and one spelled the right answer otherwise; then both are shown."""
    prompt_group = group(
        RIGHT,
        wrong(1, None),
        rollout(2, 0.1, "70.0", equal=True),
        wrong(3, "5", reward=0.2),
        wrong(4, "6", reward=0.3),
    )
    settings = {"negative": {"strict_lowest": True, "select": "most_frequent"}, "num_wrong": 2}
    actual = build_estimator("rlcsd", settings).references(prompt_group)
    spelled = TextReference(text="70.0", source_index=2)
    five = TextReference(text="5", source_index=3)
    assert actual["wrong_1"] == [spelled, spelled, five, spelled, spelled]
    assert actual["wrong_2"] == [None, five, None, None, None]
    usable = build_estimator("rlcsd", {"num_wrong": 2}).references(prompt_group)
    assert [reference.text for reference in usable["wrong_1"]] == ["5", "5", "5", "6", "5"]


@pytest.mark.parametrize("select", ["lowest_reward", "random", "most_frequent"])
def test_the_first_wrong_reference_is_cepos_choice(select: str) -> None:
    wrong_rollouts = [wrong(index, answer) for index, answer in enumerate("34535", start=1)]
    prompt_group = group(RIGHT, *wrong_rollouts)
    settings = {"negative": {"select": select}}
    rlcsd = build_estimator("rlcsd", settings).references(prompt_group)
    cepo = build_estimator("cepo", settings).references(prompt_group)
    assert rlcsd["wrong_1"][0] == cepo["wrong"][0]


def test_the_wrong_side_is_the_mean_of_the_probabilities_shown() -> None:
    """Row 1 reads two of three wrong references, so its mean is (0.5 + 0.125) / 2."""
    views = {
        "correct": constant(0.25),
        "wrong_1": constant(0.5),
        "wrong_2": constant(0.1),
        "wrong_3": constant(0.125),
    }
    batch = eight_rows(constant(0.3), views, wrong_2=[True, False] + [True] * 6)
    delta = signal_of("rlcsd", batch, num_wrong=3).diagnostics["delta"]
    of_three = (0.5 + 0.1 + 0.125) / 3
    of_two = (0.5 + 0.125) / 2
    assert float(delta[0, 0]) == pytest.approx(math.log(0.25 / of_three), rel=1e-6)
    assert float(delta[1, 0]) == pytest.approx(math.log(0.25 / of_two), rel=1e-6)


def test_one_wrong_reference_is_cepo_and_none_is_rlsd() -> None:
    old, correct, first, second = log_probs_like((4, 8, 5), seed=2).float()
    every_row = [True] * 8
    no_row = [False] * 8

    with_first = eight_rows(old, {"correct": correct, "wrong": first})
    cepo = advantages_of("cepo", with_first, step=3)
    views = {"correct": correct, "wrong_1": first, "wrong_2": old}
    one_of_two = eight_rows(old, views, wrong_1=every_row, wrong_2=no_row)
    assert same_bits(advantages_of("rlcsd", one_of_two, step=3, num_wrong=2), cepo)

    with_second = eight_rows(old, {"correct": correct, "wrong_1": second})
    assert not same_bits(advantages_of("rlcsd", with_second, step=3, num_wrong=1), cepo)

    correct_alone = eight_rows(old, {"correct": correct})
    rlsd = advantages_of("rlsd", correct_alone, step=3)
    views = {"correct": correct, "wrong_1": old, "wrong_2": old}
    none_of_two = eight_rows(old, views, wrong_1=no_row, wrong_2=no_row)
    assert same_bits(advantages_of("rlcsd", none_of_two, step=3, num_wrong=2), rlsd)


def test_sides_that_cannot_be_shown_leave_the_others() -> None:
    """Without a right side no wrong one stays; without any wrong side `fallback` decides."""
    can_be_shown = {
        "correct": torch.tensor([True, False, True]),
        "wrong_1": torch.tensor([False, True, False]),
        "wrong_2": torch.tensor([True, True, False]),
    }
    student = build_estimator("rlcsd", {"num_wrong": 2})
    student_fallback = student.settled(can_be_shown)
    assert set(student_fallback) == set(can_be_shown)
    assert student_fallback["correct"].tolist() == [True, False, True]
    assert student_fallback["wrong_1"].tolist() == [False, False, False]
    assert student_fallback["wrong_2"].tolist() == [True, False, False]
    neutral_method = build_estimator("rlcsd", {"num_wrong": 2, "negative": {"fallback": "neutral"}})
    assert neutral_method.settled(can_be_shown)["correct"].tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("name", "view", "reference"),
    [("visual", "blind", ImageReference()), ("input_contrast", "other", PromptReference())],
)
def test_evidence_of_the_input_is_student_less_other_prompt(name: str, view: str, reference: Reference) -> None:
    """A right rollout's token of delta log 1.2 has weight 1.2, a wrong one's 1 / 1.2; lambda is 1."""
    batch = eight_rows(constant(0.6), {view: constant(0.5)})
    diagnostics = signal_of(name, batch, weight={"lambda_init": 1.0}).diagnostics
    delta = diagnostics["delta"][:, 0]
    weight = diagnostics["weight"][:, 0]
    assert float(delta[0]) == pytest.approx(math.log(1.2), rel=1e-6)
    assert float(weight[0]) == pytest.approx(1.2, rel=1e-6)
    assert float(weight[1]) == pytest.approx(1 / 1.2, rel=1e-6)
    prompt_group = group(RIGHT, wrong(1, "3"))
    assert build_estimator(name).references(prompt_group) == {view: [reference, reference]}


def test_the_released_method_needs_both_sides() -> None:
    """The only right rollout has no other to read; rollouts without a wrong peer have none either."""
    method = build_estimator("rlcsd_released", {"num_wrong": 2})
    can_be_shown = {
        "correct": torch.tensor([True, False, True]),
        "wrong_1": torch.tensor([True, True, False]),
        "wrong_2": torch.tensor([True, True, False]),
    }
    settled = method.settled(can_be_shown)
    assert set(settled) == set(can_be_shown)
    for rows in settled.values():
        assert rows.tolist() == [True, False, False]
    rewards = torch.tensor([1.0, 0.0, 0.0])
    group_ids = torch.zeros(3, dtype=torch.int64)
    assert method.live_rows(rewards, group_ids, can_be_shown).tolist() == [True, False, False]
    prompt_group = group(RIGHT, wrong(1, "3"), wrong(2, "5"))
    references = method.references(prompt_group)
    assert sources(references["correct"]) == [None, 0, 0]
    assert set(sources(references["wrong_1"][1:])) == {1, 2}


def sources(references: Sequence[Reference | None]) -> list[int | None]:
    """The rollouts whose texts are read."""
    return [reference and reference.source_index for reference in references]
