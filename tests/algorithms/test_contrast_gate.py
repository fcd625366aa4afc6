"""The contrast gate: what estimates its noise, what it reads, and what it reduces to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from factories import (
    THREE_GROUPS,
    advantages_of,
    group,
    log_probs_like,
    rollout,
    rows_of_batch,
    same_bits,
    signal_of,
    three_groups,
    token_batch,
)
from torch import Tensor

from cepo.algorithms import build_estimator
from cepo.metrics import results
from cepo.types import TokenBatch

LENGTHS = THREE_GROUPS["lengths"]


def batch_of(*, scale: float = 1.0, seed: int = 3, dtype: torch.dtype = torch.float64) -> TokenBatch:
    """Two groups whose rewards differ and one of equal rewards, with random teachers."""
    old, correct, wrong = log_probs_like((3, 12, 7), seed, scale)
    return three_groups(old, {"correct": correct, "wrong": wrong}, dtype=dtype)


def pair_of(right: Sequence[float], wrong: Sequence[float], *, certainty: float = -1.0) -> TokenBatch:
    """A right and a wrong response with these contrasts; the two teachers' log-probs of each token have the mean `certainty`."""
    delta = torch.tensor([right, wrong], dtype=torch.float64)
    views = {"correct": certainty + delta / 2, "wrong": certainty - delta / 2}
    old = torch.full_like(delta, -1.0)
    return token_batch([1.0, 0.0], [0, 0], lengths=[len(right)] * 2, old=old, views=views, dtype=torch.float64)


def noise_of(batch: TokenBatch) -> float | None:
    return results(signal_of("contrast_gate", batch).metrics)["evidence/noise"]


def test_the_estimate_finds_the_deviation_of_normal_noise() -> None:
    """2 x 20,000 contrasts of a standard deviation of 0.3 nats: 0.300 within 2 %."""
    generator = torch.Generator().manual_seed(1)
    delta = 0.3 * torch.randn(2, 20_000, generator=generator, dtype=torch.float64)
    right, wrong = delta.tolist()
    assert noise_of(pair_of(right, wrong)) == pytest.approx(0.3, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("settings", "step"),
    [
        ({"floor": 1.0}, 0),
        ({"weight": {"lambda_init": 0.0}}, 0),
        ({"weight": {"lambda_schedule": "linear"}}, 25),
    ],
)
def test_floor_1_or_lambda_0_is_grpo_and_reads_no_teacher(
    settings: dict[str, Any], step: int, dtype: torch.dtype
) -> None:
    assert build_estimator("contrast_gate").needs_teacher(step=1000)
    assert not build_estimator("contrast_gate", settings).needs_teacher(step=step)
    batch = dataclasses.replace(batch_of(dtype=dtype), teacher_log_probs={})
    plain = advantages_of("grpo", batch, step=step)
    assert same_bits(advantages_of("contrast_gate", batch, step=step, **settings), plain)
    assert torch.count_nonzero(plain) > 0


def test_a_rollout_without_a_reference_is_grpos() -> None:
    batch = batch_of()
    is_shown = torch.tensor([False, True] * 6)
    views: dict[str, Tensor] = {}
    for view, values in batch.teacher_log_probs.items():
        views[view] = values.where(is_shown.unsqueeze(1), batch.old_log_probs)
    has_reference = {"correct": is_shown, "wrong": is_shown.clone()}
    partly = dataclasses.replace(batch, teacher_log_probs=views, has_reference=has_reference)
    plain = advantages_of("grpo", batch)
    gated = advantages_of("contrast_gate", partly)
    assert same_bits(gated[~is_shown], plain[~is_shown])
    assert not torch.equal(gated[is_shown], plain[is_shown])


def test_by_default_a_group_without_a_wrong_reference_is_grpos() -> None:
    """As `negative.fallback: neutral` has it; `student` contrasts the right answer with the student."""
    can_be_shown = {"correct": torch.tensor([True, True]), "wrong": torch.tensor([True, False])}
    neutral = build_estimator("contrast_gate").settled(can_be_shown)
    assert neutral["correct"].tolist() == [True, False]
    one_sided = build_estimator("contrast_gate", {"negative": {"fallback": "student"}}).settled(can_be_shown)
    assert one_sided["correct"].tolist() == [True, True]


@pytest.mark.parametrize("mixing", [1.0, 0.3])
def test_a_response_without_contrast_learns_floor_a(mixing: float) -> None:
    """Equal teachers: A ((1 - lambda) + lambda floor) at every token, GRPO's direction."""
    batch = batch_of()
    students = {"correct": batch.old_log_probs, "wrong": batch.old_log_probs}
    equal = dataclasses.replace(batch, teacher_log_probs=students)
    actual = advantages_of("contrast_gate", equal, weight={"lambda_init": mixing})
    expected = advantages_of("grpo", batch) * ((1 - mixing) + mixing * 0.1)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)


def test_groups_of_equal_rewards_do_not_count_in_the_noise() -> None:
    """Their teachers are not queried in training, so that they have the student's log-probs; here they differ widely."""
    batch = batch_of()
    views = {view: values.clone() for view, values in batch.teacher_log_probs.items()}
    views["correct"][8:] -= 50.0
    assert noise_of(dataclasses.replace(batch, teacher_log_probs=views)) == noise_of(batch)


def test_over_hindsight_it_gates_by_each_tokens_own_sign() -> None:
    """A differs by token there, and may differ in sign within a response. Some gates open, none against its own A."""
    batch = batch_of()
    settings = {"advantage": {"baseline": "hindsight"}, "negative": {"fallback": "student"}, "threshold": 0.5}
    plain = advantages_of("contrast_gate", batch, **settings, floor=1.0)
    signal = signal_of("contrast_gate", batch, **settings)
    is_open = signal.diagnostics["weight"] == 1.0
    assert is_open.any()
    assert torch.equal(is_open, (signal.advantages == plain) & batch.response_mask)
    agrees = plain * signal.diagnostics["delta"] > 0
    assert not (is_open & ~agrees).any()


def test_its_teachers_read_what_cepos_read() -> None:
    prompt_group = group(rollout(0, 1.0, "70", correct=True), rollout(1, 0.0, "40"), rollout(2, 0.0, None))
    for settings in ({}, {"positive": {"source": "peer_full"}, "negative": {"source": "peer_full"}}):
        gate = build_estimator("contrast_gate", settings)
        cepo = build_estimator("cepo", settings)
        assert gate.references(prompt_group) == cepo.references(prompt_group)


def test_metrics_count_open_gates_over_live_tokens() -> None:
    """Two of the eight tokens open, so the mean gate is (2 + 6 x 0.1) / 8 = 0.325. A further group has equal rewards."""
    pair = pair_of([3.0, 0.2, -0.2, -3.0], [-3.0, -0.2, 0.3, 0.2], certainty=-2.0)
    batch = rows_of_batch(pair, torch.tensor([0, 1, 0, 1]))
    batch = dataclasses.replace(batch, group_ids=torch.tensor([0, 0, 1, 1]))
    batch.token_level_rewards[2:] = 0.0
    signal = signal_of("contrast_gate", batch, weight={"lambda_init": 0.5})
    values = results(signal.metrics)
    assert values["evidence/open_fraction"] == 0.25
    assert values["evidence/weight_mean"] == pytest.approx(0.325)
    assert values["evidence/lambda"] == 0.5
    assert values["evidence/disagreement_rate"] == 0.5
    assert "evidence/clip_low_rate" not in values
