"""Methods are found by themselves, by name; settings are read strictly."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from case_files import cases

from cepo.algorithms import (
    Estimator,
    available_estimators,
    build_config,
    build_estimator,
    load_plugin,
    register_estimator,
)
from cepo.algorithms.registry import METHODS
from cepo.algorithms.settings import EvidenceConfig, NoSettings, WeightConfig
from cepo.errors import ConfigError
from cepo.types import Rollout, RolloutGroup, TokenBatch, TokenSignal

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
    ("name", "section", "message"),
    cases(__file__, "refused_settings.yaml"),
)
def test_a_bad_setting_is_an_error_that_begins_with_its_full_key(
    name: str, section: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        build_estimator(name, section)


def test_the_largest_double_below_1_is_an_accepted_clip_radius() -> None:
    weight = {"clip_radius": 1.0 - 2.0**-53}
    assert build_config("rlsd", {"weight": weight}) == EvidenceConfig(weight=WeightConfig(**weight))


def test_a_plugin_registers_once_and_is_built_like_any_other(tmp_path: Path) -> None:
    file = tmp_path / "my_method.py"
    file.write_text(PLUGIN)
    load_plugin(file)
    load_plugin(file)
    assert "plugin_method" in available_estimators()
    strength = build_estimator("plugin_method", {"strength": 3}).config.strength
    assert strength == 3.0
    assert type(strength) is float
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


def test_a_misspelled_field_in_reads_is_an_error_that_lists_them() -> None:
    @register_estimator("misspelled")
    class _Misspelled(Estimator):
        reads = ("old_log_prob",)  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]

        def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
            raise NotImplementedError

    with pytest.raises(ConfigError, match=r"reads names 'old_log_prob'.*known: group_ids, old_log_probs, reward_bas"):
        build_estimator("misspelled")


FAULTY_BATCH = TokenBatch(
    token_level_rewards=torch.zeros(2, 3),
    response_mask=torch.ones(2, 3, dtype=torch.bool),
    old_log_probs=torch.zeros(2, 3),
    group_ids=torch.zeros(2, dtype=torch.int64),
    teacher_log_probs={},
    correct=torch.zeros(2, dtype=torch.bool),
)


class Faulty(Estimator):
    """A method that returns what the test sets."""

    views = ("told",)

    def __init__(self, returned: Any) -> None:
        super().__init__(NoSettings())
        self.returned = returned

    def references(self, group: RolloutGroup) -> Any:
        return self.returned

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        return self.returned


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantages": torch.full((2, 3), math.nan)}, "Faulty.signal returned 6 advantages that are not finite"),
        ({"metrics": {"size": 0.5}}, "returned a float for the metric 'size'; give it with its reduction"),
    ],
)
def test_a_signal_that_cannot_be_learnt_from_is_refused(changes: dict[str, Any], message: str) -> None:
    signal = TokenSignal(**{"advantages": torch.zeros(2, 3), **changes})
    with pytest.raises(ConfigError, match=message):
        Faulty(signal).checked_signal(FAULTY_BATCH, step=0)


def test_log_probs_of_broken_weights_are_no_fault_of_the_method() -> None:
    """`trainer.on_fault` decides on such a step."""
    broken = replace(FAULTY_BATCH, old_log_probs=torch.full_like(FAULTY_BATCH.old_log_probs, math.nan))
    signal = TokenSignal(advantages=torch.full((2, 3), math.nan))
    assert Faulty(signal).checked_signal(broken, step=0) is signal


@pytest.mark.parametrize(
    ("references", "message"),
    [
        (None, "Faulty.references returned a NoneType; return a dict with a list for each of the views"),
        ({"tell": []}, r"returned the views \['tell'\], without 'told'"),
        ({"told": [None]}, "returned 1 references for 0 rollouts"),
    ],
)
def test_references_that_fit_no_view_are_refused(references: Any, message: str) -> None:
    group = RolloutGroup(prompt_id="a", ground_truth="7", rollouts=[], seed=0, step=0)
    with pytest.raises(ConfigError, match=message):
        Faulty(references).checked_references(group)


def test_a_text_in_a_references_place_is_refused() -> None:
    rollout = Rollout(
        index=0,
        reward=0.0,
        correct=False,
        response_ids=torch.zeros(1, dtype=torch.int32),
        answer=None,
        answer_equals_ground_truth=False,
    )
    group = RolloutGroup(prompt_id="a", ground_truth="7", rollouts=[rollout], seed=0, step=0)
    with pytest.raises(ConfigError, match="returned a str for 'told'"):
        Faulty({"told": ["7"]}).checked_references(group)


@pytest.mark.parametrize(
    ("views", "message"),
    [
        (("told",), r"has the teachers \['told'\] in views, and must define references"),
        ("told", r"write a tuple, \('told',\)"),
    ],
)
def test_teachers_that_read_nothing_are_refused(monkeypatch: pytest.MonkeyPatch, views: Any, message: str) -> None:
    monkeypatch.setattr(METHODS, "classes", dict(METHODS.classes))
    declared = type("Silent", (Estimator,), {"views": views, "signal": Faulty.signal})
    register_estimator("silent")(declared)
    with pytest.raises(ConfigError, match=message):
        build_estimator("silent")
