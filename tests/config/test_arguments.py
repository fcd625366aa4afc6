"""Settings are key=value; flags and configuration files without a key are told how to be written."""

from __future__ import annotations

import pytest
from case_files import cases

from cepo.config.arguments import settings_in
from cepo.errors import ConfigError


def write(key: str, value: str) -> str:
    return f"write {key}={value}"


def test_settings_are_keys_with_values() -> None:
    assert settings_in(["config=base.yaml", "a.b=1", "a.c=true"], write) == ["config=base.yaml", "a.b=1", "a.c=true"]


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["base.yaml"], "did you mean 'config=base.yaml'?"),
        (["--config", "base.yaml"], "write config=base.yaml"),
        (["--a.b", "1"], "write a.b=1"),
        (["--a.b=1"], "write a.b=1"),
        (["--a.b"], "write a.b=true"),
        (["--trainer.val_freq", "-1", "--a.b"], "write trainer.val_freq=-1"),
    ],
)
def test_a_flag_and_a_file_are_written_as_settings(words: list[str], advice: str) -> None:
    with pytest.raises(ConfigError) as raised:
        settings_in(words, write)
    assert advice in str(raised.value)


@pytest.mark.parametrize(
    ("words", "at_fault"),
    cases(__file__, "no_settings.yaml"),
)
def test_another_word_is_named_with_the_form_of_settings(words: list[str], at_fault: str) -> None:
    with pytest.raises(ConfigError) as raised:
        settings_in(words, write)
    message = str(raised.value)
    assert message.startswith(f"argument '{at_fault}': settings have the form a.b.c=value")
    assert "no space beside the equals sign" in message
    assert "quotes around the whole setting" in message


@pytest.mark.parametrize("word", ["+a.b=1", "++a.b=1", "~a.b"])
def test_a_sign_of_hydra_is_to_be_left_out(word: str) -> None:
    with pytest.raises(ConfigError, match=r"none is added or removed as in Hydra\. Write key=value without a sign"):
        settings_in([word], write)


def test_a_repeated_source_is_no_expanded_mapping() -> None:
    words = ["data.train_files=microgeo:train", "data.train_files=microgeo:validation"]
    assert settings_in(words, write) == words


def test_an_unclosed_bracket_alone_is_left_to_yaml() -> None:
    assert settings_in(["a=[1", "b=2"], write) == ["a=[1", "b=2"]
