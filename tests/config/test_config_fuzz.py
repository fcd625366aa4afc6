"""No configuration, from a file or the command line, ends in anything but an error of this package."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_arguments import REQUIRED
from fuzzing import only_our_errors
from hypothesis import example, given
from hypothesis import strategies as st

from cepo.config import check_config, dump_config, load_config
from cepo.config.listing import all_settings
from cepo.trees import nested

KEYS = [setting.key for setting in all_settings()]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=10**300, max_value=10**310),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        ["${data.seed}", "${oc.env:HOME}", "${", "???", "~nobody/x", "x" * 5000, "\x00", "1e999", "nan", "[", "{a"]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
)
WORDS = st.one_of(
    st.sampled_from(KEYS), st.sampled_from(KEYS).map(lambda key: key.rpartition(".")[0]), st.text(max_size=20)
)


def attempt(arguments: list[str]) -> None:
    with only_our_errors():
        config = load_config(arguments)
        dump_config(config)
        check_config(config)


@given(st.lists(st.tuples(WORDS, VALUES.map(str) | st.text(max_size=30)), max_size=4))
def test_any_arguments_give_a_run_or_our_error(pairs: list[tuple[str, str]]) -> None:
    attempt([*REQUIRED, *(f"{key}={value}" for key, value in pairs)])


@given(st.lists(st.text(max_size=40), max_size=3))
def test_any_words_for_arguments_give_our_error(words: list[str]) -> None:
    attempt(words)


@given(content=st.binary(max_size=100) | st.text(max_size=200).map(lambda text: text.encode(errors="surrogatepass")))
def test_any_content_of_a_file_gives_a_run_or_our_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    attempt([f"config={written(tmp_path_factory, content)}", *REQUIRED])


@given(pairs=st.lists(st.tuples(st.sampled_from(KEYS), VALUES), max_size=4))
@example(pairs=[("data.train_weights", {"": None, ".": None})])  # a dotted key leads into a value
def test_any_values_of_known_keys_give_a_run_or_our_error(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, object]]
) -> None:
    import yaml

    content = yaml.safe_dump(nested(dict(pairs)), allow_unicode=True).encode("utf-8", "replace")
    attempt([f"config={written(tmp_path_factory, content)}", *REQUIRED])


def written(factory: pytest.TempPathFactory, content: bytes) -> Path:
    file = factory.getbasetemp() / "fuzzed.yaml"
    file.write_bytes(content)
    return file
