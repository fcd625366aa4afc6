"""The methods that read what an image adds to a token: what they learn, read and count."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy
import pytest
import torch
from factories import (
    THREE_GROUPS,
    advantages_of,
    group,
    log_probs_like,
    rollout,
    same_bits,
    signal_of,
    three_groups,
    token_batch,
)
from reference_trainer import equations

from cepo.algorithms import build_estimator, statistics
from cepo.metrics import results
from cepo.types import ImageReference, TokenBatch

LENGTHS = THREE_GROUPS["lengths"]
VIEW_OF = {"vppo": "masked", "papo": "masked", "pgpo": "blind"}
every_method = pytest.mark.parametrize("name", VIEW_OF)


def batch_of(view: str, *, scale: float = 1.0, seed: int = 3, has_images: Sequence[bool] | None = None) -> TokenBatch:
    """Two groups whose rewards differ, and one of equal rewards, in float64."""
    old, teacher = log_probs_like((2, 12, 7), seed, scale)
    batch = three_groups(old, {view: teacher})
    if has_images is None:
        return batch
    sees = torch.tensor(has_images)
    teacher_or_student = teacher.where(sees.unsqueeze(1), old)
    return dataclasses.replace(batch, teacher_log_probs={view: teacher_or_student}, has_reference={view: sees})


def plain_of(batch: TokenBatch) -> list[float]:
    """GRPO's advantage of each response."""
    return statistics.group_advantages(batch.rewards, batch.group_ids).tolist()


def live_rows(name: str, batch: TokenBatch, **settings: float) -> list[bool]:
    method = build_estimator(name, settings)
    return method.live_rows(batch.rewards, batch.group_ids, batch.has_reference).tolist()


def test_vppo_adds_its_bonus_in_every_group() -> None:
    """As the released loss does; groups of equal rewards learn it alone, and need no masked image for it."""
    batch = batch_of("masked", has_images=[True] * 8 + [False] * 4)
    advantages = advantages_of("vppo", batch, log_prob_bonus=0.25)
    assert torch.equal(advantages[8:], 0.25 * batch.response_mask[8:].double())
    assert live_rows("vppo", batch, log_prob_bonus=0.25) == [True] * 12
    assert live_rows("vppo", batch) == [True] * 12, "the released method has a bonus"
    assert live_rows("vppo", batch, log_prob_bonus=0.0) == [True] * 8 + [False] * 4


def test_vppo_masks_images_of_groups_with_differing_rewards() -> None:
    vppo = build_estimator("vppo", {"log_prob_bonus": 0.25})
    flat = group(rollout(0, 1.0, "7"), rollout(1, 1.0, "7"))
    assert vppo.references(flat) == {"masked": [None, None]}
    mixed = group(rollout(0, 0.0, "7"), rollout(1, 1.0, "7"))
    half = ImageReference(masked=0.5)
    assert vppo.references(mixed) == {"masked": [half, half]}


def test_vppo_scales_average_1_and_others_stay() -> None:
    """Rollouts without an image keep GRPO's advantage at all of their tokens, and do not count in min and max."""
    has_images = [True] * 4 + [False] + [True] * 7
    batch = batch_of("masked", has_images=has_images)
    signal = signal_of("vppo", batch, token_share=1.0, log_prob_bonus=0.0)
    counted_rows = [0, 1, 2, 3, 5, 6, 7]
    weights = signal.diagnostics["weight"][counted_rows, 0]
    assert float(weights.mean()) == pytest.approx(1.0)
    assert float(weights.min()) == pytest.approx(0.9)
    grpo = advantages_of("grpo", batch)
    assert same_bits(signal.advantages[4], grpo[4])


@pytest.mark.parametrize("scale", [0.3, 1.0, 5.0, 30.0])
def test_papo_has_the_gradient_of_its_published_loss(scale: float) -> None:
    """-A log P - gamma k3 - c log P, per token, by autograd at the policy that sampled."""
    batch = batch_of("masked", scale=scale)
    log_probs = batch.old_log_probs.clone().requires_grad_()
    exponent = (batch.teacher_log_probs["masked"] - log_probs).clamp(-20.0, 20.0)
    perception = (exponent.exp() - exponent - 1).clamp(-10.0, 10.0)
    plain = torch.tensor(plain_of(batch), dtype=torch.float64).unsqueeze(1)
    ratio = (log_probs - batch.old_log_probs).exp()
    token_losses = -plain * ratio - 0.02 * perception - 0.05 * log_probs
    loss = (token_losses * batch.response_mask).sum()
    (gradient,) = torch.autograd.grad(loss, log_probs)
    torch.testing.assert_close(advantages_of("papo", batch), -gradient, rtol=1e-9, atol=1e-12)


def test_papo_learns_from_images_in_groups_of_equal_rewards() -> None:
    """delta = log 2: 0.5 (1 - 1/2) = 0.25. Without a bonus, rows without images in such groups are left out."""
    seen = torch.full((2, 1), math.log(0.5), dtype=torch.float64)
    masked = torch.full((2, 1), math.log(0.25), dtype=torch.float64)
    views = {"masked": masked}
    batch = token_batch([1.0, 1.0], [0, 0], lengths=[1, 1], old=seen, views=views, dtype=torch.float64)
    without_bonus = {"perception_weight": 0.5, "log_prob_bonus": 0.0}
    advantages = advantages_of("papo", batch, **without_bonus)
    assert advantages.flatten().tolist() == pytest.approx([0.25, 0.25])

    has_image = torch.tensor([True, False])
    one_image = dataclasses.replace(batch, has_reference={"masked": has_image})
    assert live_rows("papo", one_image, **without_bonus) == [True, False]
    assert live_rows("papo", one_image) == [True, True]


def test_papo_without_a_perception_loss_asks_no_teacher() -> None:
    batch = dataclasses.replace(batch_of("masked"), teacher_log_probs={}, has_reference={})
    method = build_estimator("papo", {"perception_weight": 0.0, "log_prob_bonus": 0.0})
    assert not method.needs_teacher(step=0)
    advantages = method.signal(batch, step=0).advantages
    assert same_bits(advantages, advantages_of("grpo", batch))


@every_method
def test_without_images_the_method_is_grpo(name: str) -> None:
    batch = batch_of(VIEW_OF[name], has_images=[False] * 12)
    settings = {} if name == "pgpo" else {"log_prob_bonus": 0.0}
    assert same_bits(advantages_of(name, batch, **settings), advantages_of("grpo", batch))


@every_method
def test_every_rollout_reads_the_prompt_without_its_image(name: str) -> None:
    prompt_group = group(rollout(0, 1.0, "70", correct=True), rollout(1, 0.0, "3"))
    without_image = {
        "vppo": ImageReference(masked=0.5),
        "papo": ImageReference(masked=0.6),
        "pgpo": ImageReference(),
    }[name]
    references = build_estimator(name).references(prompt_group)
    assert references == {VIEW_OF[name]: [without_image, without_image]}


@every_method
def test_metrics_average_over_tokens_that_saw_an_image(name: str) -> None:
    has_images = [True, True] + [False] * 10
    batch = batch_of(VIEW_OF[name], has_images=has_images)
    metrics = results(signal_of(name, batch).metrics)
    deltas = batch.old_log_probs - batch.teacher_log_probs[VIEW_OF[name]]
    seen = torch.cat([deltas[0, :7], deltas[1, :3]])
    expected = numpy.mean(equations.dependences([seen.numpy()]))
    assert metrics["perception/dependence"] == pytest.approx(expected)


@pytest.mark.parametrize(("share", "expected"), [(0.25, [1, 0, 0, 0]), (0.26, [1, 0, 0, 1]), (1.0, [1, 1, 1, 1])])
def test_of_equal_tokens_the_earlier_are_kept(share: float, expected: list[int]) -> None:
    """The highest is the first; then come the last, and two equal ones."""
    values = torch.tensor([[3.0, 1.0, 1.0, 2.0, 9.0]])
    mask = torch.tensor([[True, True, True, True, False]])
    highest = statistics.highest_tokens(values, mask, share=share)
    assert highest[0].int().tolist() == [*expected, 0]
