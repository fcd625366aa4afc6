"""The line that names the methods to measure: settings, precedence, and refusals."""

from __future__ import annotations

import pytest
import torch
from case_files import cases
from factories import token_batch

from cepo.algorithms.settings import NoSettings
from cepo.credit.method_list import LeaveOneOut, read_methods
from cepo.errors import ConfigError


def test_settings_in_parentheses_win_over_the_configs() -> None:
    algorithm = {"weight": {"lambda_init": 0.25, "clip_radius": 0.1}, "advantage": {"scale": "std"}}
    methods = read_methods("grpo, cepo(lambda_init=1, negative.select=random), cepo(scale=std)", algorithm)
    assert list(methods) == [
        "uniform", "grpo", "cepo(lambda_init=1, negative.select=random)", "cepo(scale=std)",
    ]  # fmt: skip
    _, first, second, third = methods.values()
    settings = second.config
    assert settings.weight.lambda_init == 1.0
    assert settings.weight.clip_radius == 0.1
    assert settings.negative.select == "random"
    assert settings.advantage.scale == "none"
    assert third.config.advantage.scale == "std"
    assert first.config.advantage.scale == "none"


def test_a_comma_within_brackets_separates_nothing() -> None:
    """A comma of the parentheses may stand before another bracket, as that of a mapping."""
    line = "cepo(lambda_init=1, negative={select: random, fallback: neutral}), grpo"
    methods = read_methods(line, {})
    assert list(methods) == ["uniform", line.removesuffix(", grpo"), "grpo"]
    negative = list(methods.values())[1].config.negative
    assert negative.select == "random"
    assert negative.fallback == "neutral"


def test_the_reference_is_the_reward_less_that_of_the_others() -> None:
    """1 - (0 + 0.5) / 2 = 0.75, 0 - (1 + 0.5) / 2 = -0.75 and 0.5 - (1 + 0) / 2 = 0, on response tokens alone."""
    batch = token_batch([1.0, 0.0, 0.5], [0, 0, 0], lengths=[2, 1, 2], old=torch.zeros(3, 2), views={})
    advantages = LeaveOneOut(NoSettings()).signal(batch, step=0).advantages
    torch.testing.assert_close(advantages, torch.tensor([[0.75, 0.75], [-0.75, 0.0], [0.0, 0.0]]).double())


@pytest.mark.parametrize(
    ("line", "message"),
    cases(__file__, "refused_method_lists.yaml"),
)
def test_a_line_that_cannot_be_measured_is_refused(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_methods(line, {})
    assert message in str(caught.value)
