"""Settings of LoRA: refused without a rank, where all weights would be trained in silence, and targets as a list."""

from __future__ import annotations

from pathlib import Path

import pytest

from cepo.config import load_config
from cepo.errors import ConfigError

LORA = "worker.actor.model.lora"


@pytest.mark.parametrize(
    "setting", ["alpha=16", "target_modules=all-linear", "use_dora=true", "exclude_modules=.*visual.*"]
)
def test_a_setting_of_lora_needs_a_rank(setting: str) -> None:
    """`microgeo/base` sets the rank to 0."""
    with pytest.raises(ConfigError, match=rf"argument '{LORA}.*rank is 0, so all weights would be trained. Set"):
        load_config(["config=microgeo/base", f"{LORA}.{setting}"])


def test_a_file_that_forgets_the_rank_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "worker: {actor: {model: {model_path: m, lora: {alpha: 32}}}}\ndata: {train_files: t}", encoding="utf-8"
    )
    with pytest.raises(ConfigError, match=r"mine.yaml, line 1: worker.actor.model.lora.alpha is set"):
        load_config([f"config={file}"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("config=microgeo/base", f"{LORA}.alpha=16", f"{LORA}.rank=8"),
        ("config=microgeo/base", f"{LORA}.alpha=16", f"{LORA}.rank=0"),
        ("config=geo3k/base", f"{LORA}.rank=0"),
        ("config=geo3k/base", f"{LORA}.alpha=64"),
    ],
)
def test_a_rank_that_was_chosen_is_left_alone(arguments: tuple[str, ...]) -> None:
    assert load_config(arguments).worker.actor.model.lora.alpha in (16, 32, 64)


def test_targets_may_be_a_list_as_peft_has_them() -> None:
    """`--lora_target_modules q_proj v_proj` of TRL is translated so."""
    listed = load_config(["config=geo3k/base", f"{LORA}.target_modules=[q_proj,v_proj]"])
    assert listed.worker.actor.model.lora.target_modules == "q_proj,v_proj"
