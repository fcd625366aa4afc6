"""The arguments of cepo's functions in Python: what has another type is refused with what to write."""

from __future__ import annotations

from typing import Any

import pytest

import cepo
from cepo.errors import CheckpointError, ConfigError


@pytest.mark.parametrize(
    ("file", "settings", "message"),
    [
        (["config=microgeo/base"], None, r"cepo\.load_config: file must be Path \| str \| None, got a list"),
        ({"trainer.max_steps": 3}, None, "file must be .* got a dict"),
        ("microgeo/base", ["trainer.max_steps=3"], r"settings must be dict\[str, Any\] \| None, got a list"),
        (
            "microgeo/base",
            {"worker.reward.reward_function": len},
            "reward_function has a builtin_function_or_method; accepted: .* named as 'FILE.py:FUNCTION'",
        ),
        ("microgeo/base", {"data.train_files": object()}, "data.train_files has a object; accepted: texts"),
        (
            "microgeo/base",
            {"data.train_files": [{"problem": "1 + 1"}]},
            "data.train_files must be text, got",
        ),
    ],
)
def test_a_configuration_of_other_types_is_refused(file: Any, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cepo.load_config(file, settings)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cepo.open_run(None), r"cepo\.open_run: folder must be Path \| str, got a NoneType: None"),  # type: ignore[arg-type]
        (lambda: cepo.merge(["a"], "b"), r"cepo\.merge: checkpoint must be Path \| str, got a list: \['a'\]"),  # type: ignore[arg-type]
        (lambda: cepo.merge("a", None), r"cepo\.merge: out must be Path \| str, got a NoneType"),  # type: ignore[arg-type]
        (
            lambda: cepo.merge("a", "b", dtype="bfloat16"),
            r"cepo\.merge: dtype must be Literal\['bf16', 'fp16', 'fp32'\]",
        ),  # type: ignore[arg-type]
        (lambda: cepo.push("a", 5), r"cepo\.push: name must be str, got a int: 5"),  # type: ignore[arg-type]
        (lambda: cepo.evaluate(object()), r"cepo\.evaluate: checkpoint must be Path \| str \| None, got a object"),  # type: ignore[arg-type]
        (lambda: cepo.evaluate("a", ["b"]), r"cepo\.evaluate: data must be str \| None, got a list"),  # type: ignore[arg-type]
        (
            lambda: cepo.evaluate("a", protocol="x"),
            r"protocol must be Literal\['paper', 'lmms'\] \| None, got a str: 'x'",
        ),  # type: ignore[arg-type]
    ],
)
def test_an_argument_of_another_type_is_refused_by_its_name(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_an_unknown_argument_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TypeError, match=r"cepo\.evaluate: got an unexpected .* 'greedy'; it takes checkpoint, data, "):
        cepo.evaluate("a", greedy=True)  # type: ignore[call-arg]


def test_a_file_named_as_on_a_command_line_is_found() -> None:
    assert cepo.load_config("config=microgeo/base").trainer.project_name == "cepo"


def test_training_advises_a_call_that_works() -> None:
    """A dict is no first argument of load_config, so the advice does not repeat it there."""
    with pytest.raises(ConfigError, match=r'write cepo\.train\(cepo\.load_config\("FILE", \{\.\.\.\}\)\)'):
        cepo.train({"trainer.max_steps": 3})  # type: ignore[arg-type]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Trainer'\. Known: Callback, Evaluation, "):
        _ = cepo.Trainer  # type: ignore[attr-defined]


def test_a_missing_checkpoint_names_those_of_its_run(tmp_path: Any) -> None:
    (tmp_path / "global_step_20").mkdir()
    with pytest.raises(
        CheckpointError, match=r"global_step_7 does not exist; the checkpoints of .* are global_step_20$"
    ):
        cepo.merge(tmp_path / "global_step_7", tmp_path / "merged")


def test_a_whole_model_is_no_checkpoint_to_merge(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is a whole model, with nothing to merge"):
        cepo.merge(tmp_path, tmp_path / "merged")
