"""The embedded worlds' demonstrations and wording, as warm start and templates use them."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import numpy as np
import pytest

from cepo.config.paths import MICROGEO_DATA
from cepo.microgeo.problems import generate_problem
from cepo.microgeo.world import SHAPES
from lab.doses.demonstrations import _SHARES, demonstrate_worked
from lab.worlds.chain import chain_solution, generate_chain_problem
from lab.worlds.demonstrations import Demonstration, NoiseRates, demonstrate
from lab.worlds.prompts import FORMAT_PROMPT, TEACHER_PROMPT

CONFIGS = Path(__file__).parents[2] / "configs"


def test_demonstrations_are_as_noisy_as_the_rates_say() -> None:
    """They are as often hinted as the rates say, too."""
    rates = NoiseRates()
    problems = [generate_problem(9, 4 * index, stream="noise") for index in range(2000)]
    ones = [demonstrate(problem, rates, seed=0) for problem in problems]
    assert ones == [demonstrate(problem, rates, seed=0) for problem in problems]
    for hinted, rate in ((False, rates.misread), (True, rates.misread_when_hinted)):
        misread = [one.response[0] != one.problem.seen for one in ones if (one.hint is not None) == hinted]
        assert np.mean(misread) == pytest.approx(rate, abs=0.03)
    assert np.mean([one.hint is not None for one in ones]) == pytest.approx(rates.hinted, abs=0.03)
    boxed = [re.search(r"boxed\{(\d+)\}", one.response).group(1) for one in ones]  # type: ignore[union-attr]
    follows = [one.hint == box for one, box in zip(ones, boxed, strict=True) if one.hint is not None]
    assert np.mean(follows) == pytest.approx(1 - rates.hint_is_ignored, abs=0.03)


def test_the_lab_teaches_the_wording_of_the_template_files() -> None:
    assert list(MICROGEO_DATA) == [f"microgeo:{split}" for split in SHAPES.splits]
    assert (CONFIGS / "format_prompt" / "microgeo.jinja").read_text().rstrip("\n") == FORMAT_PROMPT
    assert (CONFIGS / "teacher" / "user_suffix.jinja").read_text().rstrip("\n") == TEACHER_PROMPT


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
