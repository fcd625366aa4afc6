"""What a teacher knows of responses: the exact posterior reaches the limit, and no other teacher exceeds it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cepo.credit.agreement import QUARTERS, known
from cepo.data.dataset import Problem
from cepo.rollout.generator import Generation
from cepo.trainer.asking import Rollouts

LENGTH = 8
ONE = torch.linspace(0.2, 0.9, LENGTH, dtype=torch.float64).tolist()
"""The policy: token t is 1 with this probability, whatever came before."""


def is_right(response: tuple[int, ...]) -> bool:
    return sum(response[:4]) % 2 == 0 and response[7] == 1


def chance(response: tuple[int, ...], start: int = 0) -> float:
    return math.prod(ONE[t] if token else 1 - ONE[t] for t, token in enumerate(response, start))


@functools.cache
def value(prefix: tuple[int, ...]) -> float:
    """P(right | prefix) by enumeration."""
    ends = itertools.product((0, 1), repeat=LENGTH - len(prefix))
    return sum(chance(end, len(prefix)) for end in ends if is_right(prefix + end))


def gains(responses: list[tuple[int, ...]], teacher: Callable[[tuple[int, ...], int], float]) -> Tensor:
    """log P_teacher - log P of each token, from the teacher's unnormalised weight of a token after a prefix."""
    rows = []
    for response in responses:
        row = []
        for t, token in enumerate(response):
            weights = [chance((one,), t) * teacher(response[:t], one) for one in (0, 1)]
            ratio = weights[token] / max(sum(weights), 1e-12) / chance((token,), t)
            row.append(math.log(max(ratio, 1e-12)))  # a wrong response may be impossible
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


@pytest.fixture(scope="module")
def rollouts() -> Rollouts:
    generator = torch.Generator().manual_seed(0)
    drawn = (
        (torch.rand(400, LENGTH, generator=generator, dtype=torch.float64) < torch.tensor(ONE, dtype=torch.float64))
        .int()
        .tolist()
    )
    responses = [tuple(row) for row in drawn]
    correct = torch.tensor([is_right(response) for response in responses])
    return Rollouts(
        step=0,
        problems=[
            Problem(prompt_id=str(number), text="", images=(), ground_truth="", solution=None, columns={})
            for number in range(4)
        ],
        prompts=[],
        generations=[Generation(response_ids=row, log_probs=(-1.0,) * LENGTH, finished=True) for row in responses],
        responses=["" for _ in responses],
        scores=[{"overall": float(right)} for right in correct],
        correct=correct,
    )


def measure(rollouts: Rollouts, teacher: Callable[[tuple[int, ...], int], float]) -> dict[str, float]:
    responses = [generation.response_ids for generation in rollouts.generations]
    found = known(gains(responses, teacher), rollouts, range(len(responses)), seed=0)
    assert found.pop("responses") == rollouts.correct.sum()
    assert all(figure["low"] <= figure["value"] <= figure["high"] for figure in found.values())
    return {name: figure["value"] for name, figure in found.items()}


def test_the_posterior_knows_minus_log_p(rollouts: Rollouts) -> None:
    """For each right response the log ratios of P(y | right) add up to -log p."""
    found = measure(rollouts, lambda prefix, token: value((*prefix, token)))
    assert found["nats"] == pytest.approx(-math.log(value(())), abs=1e-9)
    assert found["limit"] == pytest.approx(-math.log(value(())), abs=0.1)
    assert sum(found[quarter] for quarter in QUARTERS) == pytest.approx(found["nats"])
    assert found["third"] == pytest.approx(0.0, abs=1e-12), "tokens 4 and 5 decide nothing"


@pytest.mark.parametrize("trust", [0.0, 0.5, 2.0, -1.0])
def test_other_teachers_know_less(rollouts: Rollouts, trust: float) -> None:
    """Of the weights V^trust only trust 1 is the posterior; 0 is the student, and -1 believes the opposite."""
    found = measure(rollouts, lambda prefix, token: max(value((*prefix, token)), 1e-3) ** trust)
    assert found["nats"] < found["limit"]
    assert (found["nats"] > 0) == (trust > 0)
    assert (found["wrong"] < 0) == (trust > 0), "what announces right responses tells against wrong ones"


def test_without_a_wrong_response_its_figure_is_undefined(rollouts: Rollouts) -> None:
    rows = [row for row, right in enumerate(rollouts.correct.tolist()) if right]
    found = known(torch.zeros(len(rollouts.correct), LENGTH), rollouts, rows, seed=0)
    assert (found["wrong"]["value"], found["nats"]["value"]) == (None, 0.0)
