"""Tests that one word changes the method and nothing else, and that a preset which changes more says it in the plan."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from cepo.config import load_config
from cepo.config.checks import plan_lines
from cepo.files.trees import leaves


def notes_of(*arguments: str) -> list[str]:
    return [line for line in plan_lines(load_config(arguments)) if "also sets" in line]


def test_the_papers_preset_says_that_it_changes_the_rate() -> None:
    """The paper gives `cepo` five times the learning rate of the other methods."""
    (note,) = notes_of("config=geo3k/cepo")
    assert "chooses cepo also sets worker.actor.optim.lr=5e-06 (else 1e-06)" in note


@pytest.mark.parametrize(
    "arguments",
    [
        ("config=geo3k/grpo",),
        ("config=geo3k/cepo", "worker.actor.optim.lr=1e-6"),
        ("config=geo3k/cepo", "algorithm.adv_estimator=grpo"),
        ("config=microgeo/base", "algorithm.adv_estimator=grpo"),
    ],
)
def test_a_method_alone_has_no_note(arguments: tuple[str, ...]) -> None:
    assert notes_of(*arguments) == []


def test_a_users_own_file_is_compared_with_its_base(tmp_path: Path) -> None:
    """A file without a base is the whole configuration: what it sets holds for each method."""
    settings = "algorithm: {adv_estimator: cepo}\nworker: {rollout: {n: 16}}\n"
    whole = tmp_path / "whole.yaml"
    file = tmp_path / "mine.yaml"
    (tmp_path / "base.yaml").write_text("worker: {rollout: {n: 4}}\n", encoding="utf-8")
    whole.write_text(settings, encoding="utf-8")
    file.write_text(f"base: base.yaml\n{settings}", encoding="utf-8")
    data_and_model = ["data.train_files=microgeo:train", "worker.actor.model.model_path=microgeo:model"]
    assert notes_of(f"config={whole}", *data_and_model) == []
    (note,) = notes_of(f"config={file}", *data_and_model)
    assert "worker.rollout.n=16 (else 4)" in note


@pytest.mark.parametrize("method", ["grpo", "rlsd", "opsd"])
@pytest.mark.parametrize("config", ["microgeo/quickstart", "geo3k/cepo", "real_model/cepo"])
def test_one_word_changes_the_method_and_nothing_else(config: str, method: str) -> None:
    """All settings outside `algorithm` and the run's name are equal."""
    plain = load_config([f"config={config}"])
    changed = load_config([f"config={config}", f"algorithm.adv_estimator={method}"])
    settings = dict(leaves(dataclasses.asdict(plain)))
    changed_settings = dict(leaves(dataclasses.asdict(changed)))
    keys = settings.keys() | changed_settings.keys()
    differing = {key for key in keys if settings.get(key) != changed_settings.get(key)}
    parts = {key.split(".")[0] for key in differing} - {"methods", "set_with_method"}
    assert parts <= {"algorithm", "trainer"}
    assert {key for key in differing if key.startswith("trainer.")} <= {"trainer.experiment_name"}
