"""The embedded worlds' demonstrations and wording, as warm start and templates use them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from cepo.config.checks import MICROGEO_DATA
from cepo.microgeo.problems import generate_problem
from cepo.microgeo.world import SHAPES
from lab.worlds.demonstrations import NoiseRates, demonstrate
from lab.worlds.prompts import FORMAT_PROMPT, TEACHER_PROMPT, user_text

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


def test_the_hinted_user_text_is_the_students_with_one_more_line() -> None:
    assert user_text("How long?") == "How long? Answer in \\boxed{}."
    assert user_text("How long?", "12") == "How long? Answer in \\boxed{}.\nHere is a sample answer: 12"
