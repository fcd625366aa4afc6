"""Words of a command line are read in every form that people write, and what a shell made of them is explained."""

from __future__ import annotations

import pytest

from cepo.config.arguments import settings_in
from cepo.errors import ConfigError


def write(key: str, value: str) -> str:
    return f"write {key}={value}"


def test_settings_are_keys_with_values() -> None:
    assert settings_in(["config=base.yaml", "a.b=1", "a.c=true"], write) == ["config=base.yaml", "a.b=1", "a.c=true"]


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["trainer.logger=[console,", "wandb]"], "'trainer.logger=[console, wandb]'"),
        (["k={n:", "2}"], "'k={n: 2}'"),
        (["k={a:", "[1,", "2]}", "x=1"], "'k={a: [1, 2]}'"),
        (["a.b", "=", "3"], "a.b=3"),
        (["a.b=", "3"], "a.b=3"),
        (["a.b", "3"], "Did you mean 'a.b=3'?"),
        (["a.b:3"], "Did you mean 'a.b=3'?"),
        (["a.b:", "3"], "Did you mean 'a.b=3'?"),
        (["+a.b=1"], "Did you mean 'a.b=1'?"),
        (["~a.b"], "'a.b=null' gives it none"),
        (["-m", "a.b=1,2"], "'-m': a command is one run"),
        (["--multirun", "a.b=1,2"], "'--multirun': a command is one run"),
        (["rloo"], "'algorithm.adv_estimator=rloo'? Several methods stand in one word: --methods a,rloo"),
        (["microgeo:validation"], "data=microgeo:validation in evaluate"),
        (["."], "data.train_files=. in train"),
        (["base.yaml"], "Did you mean 'config=base.yaml'?"),
        (["--config", "base.yaml"], "write config=base.yaml"),
        (["--a.b", "1"], "write a.b=1"),
        (["--a.b=1"], "write a.b=1"),
        (["--a.b"], "write a.b=true"),
        (["--trainer.val_freq", "-1", "--a.b"], "write trainer.val_freq=-1"),
    ],
)
def test_what_a_shell_split_is_written_whole(words: list[str], advice: str) -> None:
    with pytest.raises(ConfigError) as raised:
        settings_in(words, write)
    assert advice in str(raised.value)


def test_a_repeated_source_is_no_expanded_mapping() -> None:
    words = ["data.train_files=microgeo:train", "data.train_files=microgeo:validation"]
    assert settings_in(words, write) == words


def test_an_unclosed_bracket_alone_is_left_to_yaml() -> None:
    assert settings_in(["a=[1", "b=2"], write) == ["a=[1", "b=2"]
