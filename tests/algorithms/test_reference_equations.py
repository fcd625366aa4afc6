"""Methods of evidence and of images against the equations of the second trainer, which are NumPy in loops over tokens."""

from __future__ import annotations

import dataclasses

import numpy
import pytest
import torch
from factories import THREE_GROUPS, advantages_of, log_probs_like, same_bits, token_batch
from reference_trainer import equations
from torch import Tensor

from cepo.types import TokenBatch

LENGTHS = THREE_GROUPS["lengths"]
PLAIN = equations.group_advantages(THREE_GROUPS["rewards"], 4)


def batch_of(*views: str, scale: float = 1.0, **changes: list[float]) -> TokenBatch:
    """Three groups of four in float64, of which the last has equal rewards, with random teachers."""
    old, *teachers = log_probs_like((1 + len(views), 12, 7), 3, scale)
    log_probs = dict(zip(views, teachers, strict=True))
    return token_batch(**THREE_GROUPS | changes, old=old, views=log_probs, dtype=torch.float64)


def by_token(values: Tensor) -> equations.Rows:
    """(12, 7) as one array per response, without padding."""
    return [row[:length].numpy() for row, length in zip(values, LENGTHS, strict=True)]


def assert_advantages(actual: Tensor, expected: equations.Rows) -> None:
    numpy.testing.assert_allclose(numpy.concatenate(by_token(actual)), numpy.concatenate(expected), 1e-9, 1e-12)


@pytest.mark.parametrize("scale", [0.05, 1.0, 5.0])
@pytest.mark.parametrize(("threshold", "floor", "mixing"), [(2.0, 0.1, 1.0), (0.5, 0.4, 0.7), (0.0, 0.0, 1.0)])
def test_the_gate_is_its_equation(scale: float, threshold: float, floor: float, mixing: float) -> None:
    batch = batch_of("correct", "wrong", scale=scale)
    teachers = batch.teacher_log_probs
    correct = by_token(teachers["correct"])
    wrong = by_token(teachers["wrong"])
    sides = list(zip(correct, wrong, strict=True))
    plain = equations.spread(PLAIN, LENGTHS)
    expected = equations.gated_advantages(plain, sides, mixing, threshold, floor)
    weight = {"lambda_init": mixing}
    actual = advantages_of("contrast_gate", batch, threshold=threshold, floor=floor, weight=weight)
    assert_advantages(actual, expected)


@pytest.mark.parametrize("scale", [0.3, 1.0, 5.0])
def test_the_methods_of_images_are_their_equations(scale: float) -> None:
    batch = batch_of("masked", "blind", scale=scale)
    by_view: dict[str, equations.Rows] = {}
    for view, log_probs in batch.teacher_log_probs.items():
        by_view[view] = by_token(batch.old_log_probs - log_probs)
    vppo = equations.vppo_advantages(PLAIN, by_view["masked"], [True] * 12, share=0.4, lowest=0.9, bonus=0.06)
    assert_advantages(advantages_of("vppo", batch), vppo)
    pgpo = equations.pgpo_advantages(PLAIN, by_view["blind"], threshold=0.4, boost=2.0)
    assert_advantages(advantages_of("pgpo", batch), pgpo)


@pytest.mark.parametrize("name", ["cepo", "rlsd"])
def test_each_tokens_own_sign_weights_it_over_hindsight(name: str) -> None:
    """Of rewards between 0 and 1 the baseline rises past some, so that A changes its sign within a response."""
    rewards = [0.25, 0.75, 0.4, 0.6] * 3
    batch = batch_of("correct", "wrong", rewards=rewards)
    correct = batch.teacher_log_probs["correct"]
    compared = batch.teacher_log_probs["wrong"] if name == "cepo" else batch.old_log_probs
    plain = equations.hindsight(rewards, by_token(correct - batch.old_log_probs), 4)
    assert any(len(set(numpy.sign(row))) == 2 for row in plain)
    assert_advantages(advantages_of("hindsight", batch), plain)
    expected = equations.evidence_advantages(plain, by_token(correct - compared), mixing=0.5, radius=0.5)
    baseline = {"baseline": "hindsight"}
    assert_advantages(advantages_of(name, batch, advantage=baseline), expected)
    at_lambda_0 = advantages_of(name, batch, step=25, advantage=baseline)
    assert same_bits(at_lambda_0, advantages_of("hindsight", batch, step=25))


@pytest.mark.parametrize("closeness", [1.0, 0.02, 0.005])
def test_the_released_residual_is_its_equation(closeness: float) -> None:
    """Teachers whose log-probs are `closeness` times as far from the student's as random ones; not every row has both sides."""
    wrong_names = ("wrong_1", "wrong_2", "wrong_3", "wrong_4")
    batch = batch_of("correct", *wrong_names)
    views: dict[str, Tensor] = {}
    for name, values in batch.teacher_log_probs.items():
        views[name] = torch.lerp(batch.old_log_probs, values, closeness)
    has_reference = {"correct": torch.arange(12) < 7}
    is_shown = torch.rand(4, 12, generator=torch.Generator().manual_seed(5)) > 0.4
    for name, rows in zip(wrong_names, is_shown, strict=True):
        has_reference[name] = rows
    batch = dataclasses.replace(batch, teacher_log_probs=views, has_reference=has_reference)

    has_both: list[bool] = []
    deltas: equations.Rows = []
    for row, length in enumerate(LENGTHS):
        wrong_names_shown = [name for name in wrong_names if has_reference[name][row]]
        has_both.append(row < 7 and bool(wrong_names_shown))
        wrong = torch.zeros(length)
        if wrong_names_shown:
            probabilities = torch.stack([views[name][row, :length].exp() for name in wrong_names_shown])
            wrong = probabilities.mean(dim=0).log()
        delta = views["correct"][row, :length] - wrong
        deltas.append(delta.numpy())
    expected = equations.residual_advantages(PLAIN, deltas, has_both, strength=0.5, tau=0.02, threshold=0.02)
    assert_advantages(advantages_of("rlcsd_released", batch), expected)
