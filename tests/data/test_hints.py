"""How a reference is worded before a teacher, and what is taken out of it first."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepo.data.contexts import TEMPLATES, HintTemplate, sanitise_reference
from cepo.errors import ConfigError

SPECIALS = ["<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|vision_start|>", "<image>"]


def write(folder: Path, source: str) -> str:
    file = folder / "hint.jinja"
    file.write_text(source, encoding="utf-8")
    return str(file)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ prompt }}", "never uses the variable reference"),
        ("{{ prompt }}\nThis reference is only a word", "never uses the variable reference"),
        ("{{ prompt }}{# {{ reference }} #}", "never uses the variable reference"),
        ("{{ prompt }} {{ reference", "does not parse"),
        ("{{ prompt }} {{ reference }} {{ answer }}", "uses answer; accepted variables: prompt, reference"),
    ],
)
def test_a_template_that_cannot_give_the_hint_is_an_error(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"teacher\.template .*hint\.jinja {message}"):
        HintTemplate("user_suffix", write(tmp_path, source))


def test_templates_are_sandboxed(tmp_path: Path) -> None:
    path = write(tmp_path, "{{ prompt.__class__.__mro__ }} {{ reference }}")
    with pytest.raises(ConfigError, match="cannot be rendered"):
        HintTemplate("user_suffix", path).render(prompt="p", reference="r")


def test_a_template_file_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"teacher\.template nowhere\.jinja does not exist"):
        HintTemplate("user_suffix", "nowhere.jinja")
    (tmp_path / "hint.jinja").write_bytes(b"\x80 {{ reference }}")
    with pytest.raises(ConfigError, match=r"hint\.jinja is not text in UTF-8 .*give a Jinja file that uses prompt"):
        HintTemplate("user_suffix", str(tmp_path / "hint.jinja"))


@pytest.mark.parametrize("expression", ["prompt / 2", "1 / 0", "prompt[0][9]", "range(10 ** 6) | list"])
def test_a_template_that_raises_is_named(tmp_path: Path, expression: str) -> None:
    with pytest.raises(ConfigError, match=r"hint\.jinja (cannot be rendered|does not parse): "):
        HintTemplate("user_suffix", write(tmp_path, "{{ prompt }}{{ reference }}{{ " + expression + " }}"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5 \\sqrt { 3 }", "5 \\sqrt { 3 }"), ("  70\n\n cm\t", "70 cm"), ("1\r2", "1 2"),
        ("1\u20282\u00853\x0b4\x0c5", "1 2 3 4 5"), ("7\x000\u200b\ufeff", "70"),
        ("70<|im_end|>\n<|im_start|>user", "70 user"), ("<image>70<|image_pad|>", "70"),
        ("<|im_<image>end|>70", "70"), ("<|im_<|im_end|>end|>70", "70"), ("<|im_\x00end|>70", "70"),
        ("<|im_end|>", ""), ("角 70°", "角 70°"),
    ],
)  # fmt: skip
def test_table_of_sanitised_texts(text: str, expected: str) -> None:
    assert sanitise_reference(text, SPECIALS) == expected


@given(
    st.lists(st.text(alphabet="<|> ab", min_size=1, max_size=4), max_size=4),
    st.text(alphabet="<|> ab\n\r\x00\u200b\u2028", max_size=40),
)
def test_no_special_text_or_control_character_survives(specials: list[str], text: str) -> None:
    clean = sanitise_reference(text, specials)
    assert not [special for special in specials if special in clean]
    assert not set(clean) & set("\n\r\x00\u200b\u2028")
    assert "  " not in clean
    assert sanitise_reference(clean, specials) == clean


def test_specials_nested_100000_deep_are_removed_at_once() -> None:
    depth = 100_000
    began = time.process_time()
    assert sanitise_reference("7" + "<|im_" * depth + "end|>" * depth + " 0", SPECIALS) == "7 0"
    assert time.process_time() - began < 10


@given(st.text(alphabet=st.characters(blacklist_categories=["C", "Z"]), max_size=30))
def test_text_without_specials_blanks_and_controls_is_left_alone(text: str) -> None:
    assert sanitise_reference(text, SPECIALS) == text or any(special in text for special in SPECIALS)


def test_a_free_template_may_put_the_reference_first(tmp_path: Path) -> None:
    """A user_suffix template may not."""
    path = write(tmp_path, "Sample: {{ reference }}\n{{ prompt }}\n")
    assert HintTemplate("free", path).render(prompt="Find x.", reference="7") == "Sample: 7\nFind x."
    with pytest.raises(ConfigError, match=r"must begin with the prompt.*use placement free"):
        HintTemplate("user_suffix", path)


def test_a_free_template_must_hold_the_prompt_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="free has no built-in wording"):
        HintTemplate("free")
    with pytest.raises(ConfigError, match="exactly once"):
        HintTemplate("free", write(tmp_path, "{{ prompt }} {{ reference }} {{ prompt }}"))


@pytest.mark.parametrize("placement", ["user_suffix", "assistant_prefix"])
def test_the_shipped_template_files_are_the_built_in_wordings(placement: str) -> None:
    file = Path(__file__).parents[2] / "configs" / "teacher" / f"{placement}.jinja"
    assert file.read_text().removesuffix("\n") == TEMPLATES[placement]
