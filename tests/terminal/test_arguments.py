"""Words of a command line are read in every form that people write, and what a shell made of them is explained."""

from __future__ import annotations

import pytest

from cepo.errors import ConfigError
from cepo.terminal.arguments import settings_in


@pytest.mark.parametrize(
    "words",
    [
        ["config=base.yaml", "a.b=1", "a.c=true"],
        ["--config", "base.yaml", "--a.b", "1", "--a.c"],
        ["--config=base.yaml", "--a.b=1", "--a.c=true"],
        ["-c", "base.yaml", "+a.b=1", "++a.c=true"],
        ["base.yaml", "a.b=1", "--a.c"],
    ],
)
def test_a_setting_has_several_forms(words: list[str]) -> None:
    assert settings_in(words) == ["config=base.yaml", "a.b=1", "a.c=true"]


def test_a_negative_number_is_a_value() -> None:
    assert settings_in(["--trainer.val_freq", "-1", "--a.b"]) == ["trainer.val_freq=-1", "a.b=true"]


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["trainer.logger=[console,", "wandb]"], "'trainer.logger=[console, wandb]'"),
        (["k={n:", "2}"], "'k={n: 2}'"),
        (["k={a:", "[1,", "2]}", "x=1"], "'k={a: [1, 2]}'"),
        (["override_config=n:2", "override_config=t:0"], "'override_config={n: 2, t: 0}'"),
        (["a.b", "=", "3"], "a.b=3"),
        (["a.b=", "3"], "a.b=3"),
        (["a.b", "3"], "Did you mean 'a.b=3'?"),
        (["a.b:3"], "Did you mean 'a.b=3'?"),
        (["a.b:", "3"], "Did you mean 'a.b=3'?"),
        (["~a.b"], "cannot be removed"),
    ],
)
def test_what_a_shell_split_is_written_whole(words: list[str], advice: str) -> None:
    with pytest.raises(ConfigError) as raised:
        settings_in(words)
    assert advice in str(raised.value)


def test_a_repeated_source_is_no_expanded_mapping() -> None:
    words = ["data.train_files=microgeo:train", "data.train_files=microgeo:validation"]
    assert settings_in(words) == words


def test_an_unclosed_bracket_alone_is_left_to_yaml() -> None:
    assert settings_in(["a=[1", "b=2"]) == ["a=[1", "b=2"]
