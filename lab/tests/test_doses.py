"""Demonstrations with a worked solution in view: what fits is followed, right or wrong, and another problem's is not."""

from __future__ import annotations

import statistics

import pytest

from lab.doses.demonstrations import _SHARES, demonstrate_worked
from lab.worlds.chain import chain_solution, generate_chain_problem
from lab.worlds.demonstrations import Demonstration

NUMBER = 300


@pytest.fixture(scope="module")
def shown() -> list[Demonstration]:
    return [demonstrate_worked(generate_chain_problem(5, number, stream="test"), seed=3) for number in range(NUMBER)]


def ends_of(text: str) -> str:
    return text.rpartition("\\boxed")[2]


def test_the_same_arguments_give_the_same_walk(shown: list[Demonstration]) -> None:
    assert demonstrate_worked(shown[7].problem, seed=3) == shown[7]
    assert demonstrate_worked(shown[7].problem, seed=4) != shown[7]


def test_walks_end_as_the_solution_in_view_does(shown: list[Demonstration]) -> None:
    """Of 20 steps a walk leaves one; a walk without a solution in view would be right in less than half."""
    right = [each for each in shown if ends_of(each.hint) == ends_of(chain_solution(each.problem))]
    assert len(right) / NUMBER == pytest.approx(_SHARES[0], abs=0.1)
    assert statistics.fmean(each.response.endswith(ends_of(each.hint)) for each in right) > 0.6
    others = [each for each in shown if each not in right]
    followed = statistics.fmean(ends_of(each.response) == ends_of(each.hint) for each in others)
    assert 0.1 < followed < 0.6, "wrong solutions of the problem are followed, those of other problems are not"
