"""Methods are found by themselves, by name; settings are read strictly."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from cepo.algorithms import (
    Estimator,
    available_estimators,
    build_config,
    build_estimator,
    load_plugin,
    register_estimator,
)
from cepo.algorithms.settings import EvidenceConfig, WeightConfig
from cepo.errors import ConfigError

PLUGIN = """
from dataclasses import dataclass
from cepo.algorithms import Estimator, register_estimator
from cepo.types import TokenSignal

@register_estimator("plugin_method")
class PluginMethod(Estimator):
    @dataclass(frozen=True, kw_only=True)
    class Config:
        strength: float = 2.0

    def signal(self, batch, *, step):
        return TokenSignal(advantages=self.config.strength * batch.response_mask.float())
"""


def test_a_second_class_of_the_same_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'grpo' is already registered by cepo\.algorithms\.grpo"):

        @register_estimator("grpo")
        class _Second(Estimator):
            pass


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"negative": {"selct": "random"}}, r"unknown key 'algorithm\.negative\.selct'\. Did you mean 'select'\?"),
        *(
            ({"weight": {"clip_radius": value}}, rf"algorithm\.weight\.clip_radius must be .* below 1, got {value}")
            for value in (1.0, -0.1)
        ),
        *(
            ({"weight": {"lambda_init": value}}, r"algorithm\.weight\.lambda_init must")
            for value in (1.5, -0.1, math.nan)
        ),
        ({"weight": {"lambda_decay_steps": 0}}, r"algorithm\.weight\.lambda_decay_steps must be at least 1"),
        ({"weight": {"lambda_warmup_steps": -1}}, r"algorithm\.weight\.lambda_warmup_steps must be at least 0"),
        ({"weight": {"lambda_schedule": "cosine"}}, r"algorithm\.weight\.lambda_schedule"),
        ({"teacher": {"sync_every": 0}}, r"algorithm\.teacher\.sync_every must be at least 1, got 0"),
        ({"teacher": "actor"}, r"algorithm\.teacher must be a section with keys"),
    ],
)
def test_a_bad_setting_is_an_error_that_begins_with_its_full_key(section: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        build_estimator("cepo", section)


def test_settings_reach_the_config_with_whole_numbers_as_floats() -> None:
    given = {"weight": {"lambda_init": 1}, "teacher": {"template": None}, "negative": {"select": "random"}}
    config = build_config("cepo", given)
    assert (config.weight.lambda_init, type(config.weight.lambda_init), config.teacher.template) == (1.0, float, None)
    assert (config.negative.select, config.weight.clip_radius) == ("random", 0.5)
    assert dataclasses.replace(config, weight=WeightConfig(clip_radius=0.1)).negative == config.negative


def test_the_largest_double_below_1_is_an_accepted_clip_radius() -> None:
    weight = {"clip_radius": 1.0 - 2.0**-53}
    assert build_config("rlsd", {"weight": weight}) == EvidenceConfig(weight=WeightConfig(**weight))


def test_a_plugin_registers_once_and_is_built_like_any_other(tmp_path: Path) -> None:
    file = tmp_path / "my_method.py"
    file.write_text(PLUGIN)
    load_plugin(file)
    load_plugin(file)
    assert "plugin_method" in available_estimators()
    assert build_estimator("plugin_method", {"strength": 3}).config.strength == 3.0
    with pytest.raises(ConfigError, match=r"algorithm\.plugin_method\.strenght'. .* 'strength'"):
        build_estimator("plugin_method", {"strenght": 3})


def test_a_plugin_that_is_missing_or_fails_is_an_error_each_time(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.plugins: nowhere\.py is not a file"):
        load_plugin("nowhere.py")
    file = tmp_path / "broken.py"
    file.write_text("raise RuntimeError('broken on purpose')")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken on purpose"):
            load_plugin(file)
