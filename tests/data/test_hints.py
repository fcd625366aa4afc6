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


@pytest.mark.parametrize(
    ("placement", "source", "message"),
    [
        ("user_suffix", "{{ prompt }}\nThis reference is only a word", "uses the variables prompt; needed: reference"),
        ("user_suffix", "{{ prompt }}{# {{ reference }} #}", "uses the variables prompt; needed: reference"),
        ("user_suffix", "{{ prompt }} {{ reference", "does not parse"),
        ("user_suffix", "{{ prompt }} {{ reference }} {{ answer }}", "uses .*answer.*; needed: reference, further"),
        ("user_suffix", "Sample: {{ reference }}\n{{ prompt }}", "must begin with the prompt .*use placement free"),
        ("free", "{{ prompt }} {{ reference }} {{ prompt }}", "must contain the prompt exactly once"),
        *(
            ("user_suffix", f"{{{{ prompt }}}}{{{{ reference }}}}{{{{ {expression} }}}}", "(cannot be rendered|does not parse): ")
            for expression in ("prompt / 2", "1 / 0", "prompt[0][9]", "range(10 ** 6) | list", "prompt.__class__.__mro__")
        ),
    ],
)  # fmt: skip
def test_a_template_that_cannot_give_the_hint_is_an_error(
    tmp_path: Path, placement: str, source: str, message: str
) -> None:
    file = tmp_path / "hint.jinja"
    file.write_text(source)
    with pytest.raises(ConfigError, match=rf"teacher\.template .*hint\.jinja {message}"):
        HintTemplate(placement, str(file))


def test_a_free_template_may_put_the_reference_first(tmp_path: Path) -> None:
    (tmp_path / "hint.jinja").write_text("Sample: {{ reference }}\n{{ prompt }}\n")
    template = HintTemplate("free", str(tmp_path / "hint.jinja"))
    assert template.render(prompt="Find x.", reference="7") == "Sample: 7\nFind x."
    with pytest.raises(ConfigError, match="free has no built-in wording"):
        HintTemplate("free")


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


@pytest.mark.parametrize("placement", ["user_suffix", "assistant_prefix"])
def test_the_shipped_template_files_are_the_built_in_wordings(placement: str) -> None:
    file = Path(__file__).parents[2] / "configs" / "teacher" / f"{placement}.jinja"
    assert file.read_text().removesuffix("\n") == TEMPLATES[placement]
