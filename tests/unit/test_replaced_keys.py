"""Keys of the authors' fork: the error's lines, pasted, give the run that the keys meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cepo.algorithms import available_estimators, estimator_class
from cepo.algorithms.replaced import replaced_keys
from cepo.config import RunConfig, load_config
from cepo.errors import ConfigError

DATA_AND_MODEL = ["data.train_files=microgeo:train", "worker.actor.model.model_path=microgeo:model"]
FORK_SCRIPT = [
    "algorithm.adv_estimator=grpo",
    "algorithm.cepo_use_cot_teacher=False",
    "algorithm.cepo_cot_prefix_len=512",
    "algorithm.use_cepo=True",
    "algorithm.cepo_lambda_init=0.4",
    "algorithm.cepo_warmup_steps=20",
    "algorithm.cepo_eps_w=0.2",
    "algorithm.cepo_lambda_schedule=linear",
    "worker.actor.cepo_needs_ref=False",
]


def message_of(arguments: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config([*DATA_AND_MODEL, *arguments])
    return str(caught.value)


def pasted(message: str, folder: Path) -> tuple[RunConfig, RunConfig]:
    """The runs of the message's YAML lines and of its arguments."""
    _, lines, _, arguments = message.split("\n\n")[:4]
    (folder / "pasted.yaml").write_text(lines, encoding="utf-8")
    return (
        load_config([*DATA_AND_MODEL, f"config={folder / 'pasted.yaml'}"]),
        load_config([*DATA_AND_MODEL, *arguments.split("\n")[0].split()]),
    )


def test_the_forks_script_is_told_its_own_values_in_lines_that_resolve(tmp_path: Path) -> None:
    message = message_of(FORK_SCRIPT)
    for argument in FORK_SCRIPT[1:]:
        assert f"{argument.partition('=')[0]} (argument '{argument}')" in message
    for run in pasted(message, tmp_path):
        assert run.algorithm.adv_estimator == "cepo"
        section = run.algorithm.methods["cepo"]
        assert (section["lambda_init"], section["lambda_decay_steps"], section["clip_radius"]) == (0.4, 20, 0.2)
        assert (section["teacher"]["source"], section["positive"]["source"]) == ("actor", "ground_truth")


def test_keys_in_a_file_are_named_with_their_lines_and_answered_in_its_form(tmp_path: Path) -> None:
    text = "algorithm:\n  adv_estimator: rlsd\n  rlsd_lambda_init: 0.3\n  rlsd_epsilon_w: 0.1\n  rlsd_teacher_sync_freq: 10\n"
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    message = message_of([f"config={tmp_path / 'run.yaml'}"])
    assert f"algorithm.rlsd_epsilon_w ({tmp_path / 'run.yaml'}, line 4)" in message
    assert "\n\nalgorithm:\n  rlsd:\n    lambda_init: 0.3\n    clip_radius: 0.1\n    teacher:\n" in message
    for run in pasted(message, tmp_path):
        assert run.algorithm.methods["rlsd"]["teacher"]["sync_every"] == 10


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("worker.actor.cepo_needs_ref=true", "teacher.source", "reference"),
        ("algorithm.cepo_use_cot_teacher=yes", "negative.source", "peer_prefix"),
    ],
)
def test_a_switch_that_is_on_is_answered_by_what_it_turned_on(
    argument: str, key: str, value: str, tmp_path: Path
) -> None:
    for run in pasted(message_of([argument]), tmp_path):
        setting: Any = run.algorithm.methods["cepo"]
        for part in key.split("."):
            setting = setting[part]
        assert setting == value


def test_keys_that_said_nothing_are_to_be_removed() -> None:
    message = message_of(["algorithm.use_cepo=false", "algorithm.cepo_histogram_freq=5"])
    assert "nothing has to take their place" in message
    assert "algorithm.cepo_histogram_freq (argument" in message
    message = message_of(["algorithm.use_cepo=true", "algorithm.cepo_histogram_freq=5"])
    assert "Nothing takes the place of algorithm.cepo_histogram_freq." in message


def test_12_keys_are_replaced_and_none_is_a_setting_of_this_package() -> None:
    assert len(replaced_keys()) == 12
    assert sum(len(estimator_class(name).replaced_keys) for name in available_estimators()) == 12
    for key in replaced_keys():
        with pytest.raises(ConfigError, match="authors' fork"):
            load_config([*DATA_AND_MODEL, f"{key}=1"])
