"""Any template gives prompts and references, or an error of this package when it is read or first used."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest
from fuzzing import only_our_errors
from hypothesis import given
from hypothesis import strategies as st

from cepo.config.schema import DataConfig
from cepo.data.contexts import HintTemplate
from cepo.data.dataset import ProblemSet
from cepo.models.processing import Processing

EXPRESSIONS = [
    "{name}", "{name}", "{name}", "{name}.x", "{name}[0]", "{name}[99]", "{name}.__class__", "{name} / 2",
    "{name} + 1", "{name} * 3", "{name} % 0", "1 / 0", "-{name}", "{name} | upper", "{name} | trim",
    "{name} | int(base=99)", "{name} | join", "{name} | nosuch", "{name} | batch(0) | list", "{name} | attr('x')",
    "{name}()", "{name} is nosuch", "{name} ~ 7", "range(9)", "range(10 ** 6)", "7", "'", "",
    "{name} if {name} else {name}", "lipsum()", "cycler", "namespace(a=1).a", "joiner()()", "{name}.format(1)",
    "'{}'.format", "{name} | tojson", "{name} | float", "{name} | indent('x')", "{name} | center(-5)",
    "dict({name}=1)", "{name} == loop", "self", "caller()", "{name} | sort | first", "{name}.encode()",
    "{name} | map('x') | list",
]  # fmt: skip
BLOCKS = [
    "{% if {name} %}", "{% else %}", "{% endif %}", "{% for x in {name} %}", "{% endfor %}", "{% for x in 7 %}",
    "{# ", " #}", "{% raw %}", "{% endraw %}", "{% set {name} = 7 %}", "{% include 'a' %}", "{% extends {name} %}",
    "{% macro m({name}) %}", "{% endmacro %}", "{% block b %}", "{% endblock %}", "{% import 'os' as os %}",
    "{% call m() %}", "{% filter upper %}", "{% endfilter %}", "{% with {name} = 1 %}", "{% endwith %}", "{%", "%}",
    "{{", "}}", "{% nosuch %}", "{% for x in {name} recursive %}{{ loop(7) }}{% endfor %}", "{% do 1 %}",
    "{%- if 1 -%}",
]  # fmt: skip


def templates(names: list[str]) -> st.SearchStrategy[str]:
    """Text, expressions and blocks that use `names`; about half of them are templates that can be used."""

    def filled(piece: str) -> st.SearchStrategy[str]:
        return st.sampled_from(names).map(lambda name: piece.replace("{name}", name))

    expressions = st.sampled_from(EXPRESSIONS).flatmap(filled).map(lambda text: "{{ " + text + " }}")
    usual = st.sampled_from(names[:2]).map(lambda name: "{{ " + name + " }}")
    pieces = st.sampled_from([" ", "\n", "é"]) | st.text(max_size=4) | usual | expressions
    blocks = st.sampled_from(BLOCKS).flatmap(filled)
    return (st.lists(pieces, max_size=4) | st.lists(pieces | blocks, max_size=6)).map("".join)


KNOWN_VALUES = ["Find x.", "", "{{ 7 * 7 }}", "{% raw %}", "7", "a\nb", "\0", "<image>"]
VALUES = st.sampled_from(KNOWN_VALUES) | st.text(max_size=9)
BYTES = st.binary(max_size=30)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("templates") / "any.jinja"


@given(source=templates(["content", "content", "prompt"]).map(str.encode) | BYTES, question=VALUES)
def test_any_format_prompt_gives_problems_or_our_error(
    file: Path, tiny_processing: Processing, source: bytes, question: str
) -> None:
    """The question is data: what it says is never run, and a template that ignores it is refused."""
    file.write_bytes(source)
    rows = datasets.Dataset.from_dict({"prompt": [question + "?", "7"], "answer": ["1", "2"]})
    config = DataConfig(train_files="rows", format_prompt=str(file), skip_bad_rows=True, max_prompt_length=10_000)
    with only_our_errors():
        for problem in ProblemSet("rows", config, tiny_processing, rows=rows):
            assert b"content" in source
            assert "49" not in problem.text or b"49" in source or "49" in question


@given(
    source=templates(["reference", "prompt", "content"]).map(str.encode) | BYTES,
    placement=st.sampled_from(["user_suffix", "assistant_prefix", "free"]),
    prompt=VALUES,
    reference=VALUES,
)
def test_any_wording_of_a_hint_is_used_or_our_error(
    file: Path, source: bytes, placement: str, prompt: str, reference: str
) -> None:
    file.write_bytes(source)
    with only_our_errors():
        template = HintTemplate(placement, str(file))
        text = template.render(prompt=prompt, reference=reference)
        assert b"reference" in source
        if source == b"{{ prompt }} {{ reference }}":
            assert text == f"{prompt} {reference}"
    expected = {"user_suffix": f"{prompt}\nHere is a sample answer: {reference}", "assistant_prefix": f"{reference}\n"}
    for built_in, text in expected.items():
        assert HintTemplate(built_in).render(prompt=prompt, reference=reference) == text
