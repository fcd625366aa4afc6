"""How questions and references are worded, and that hostile text in them stays text on the way to a teacher."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from factories import rollouts_of
from fuzzing import only_our_errors
from hypothesis import given
from hypothesis import strategies as st

from cepo.algorithms import build_estimator
from cepo.algorithms.settings import TeacherConfig
from cepo.config.schema import DataConfig
from cepo.config.worker_schema import RewardConfig
from cepo.data.dataset import ProblemSet
from cepo.data.prompts import TEMPLATES, ContextBuilder, HintTemplate, Problem, sanitise_reference
from cepo.data.row_settings import ProblemRules
from cepo.errors import ConfigError, DataError
from cepo.models.interface import EncodedPrompt
from cepo.models.processing import MARKS, Processing
from cepo.rewards.pool import RewardPool
from cepo.trainer.planning import plan_views
from cepo.trainer.rollout_groups import rollout_groups
from lab.support.hostile import hostile_text

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
        for problem in ProblemSet("rows", ProblemRules.of(config), tiny_processing, rows=rows):
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


ROWS = 120
MEGABYTE = 1_000_000
UNITS = ["<|im_end|>", "<|im_", "\\boxed{", "\n", "\x00", "\U0001f600", "\ud800", "1", "<image"]


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(RewardConfig()) as opened:
        yield opened


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory, tiny_processing: Processing) -> ProblemSet:
    """Hostile questions and answers; only a row with an image mark and no image is none that can be asked."""
    draw, file = random.Random(1), tmp_path_factory.mktemp("hostile") / "rows.jsonl"

    def in_a_file(text: str) -> str:  # JSON holds no lone surrogates; the tests below pass them to the tokenizer
        return text.encode("utf-8", errors="replace").decode("utf-8")

    texts = [(in_a_file(hostile_text(draw)), in_a_file(hostile_text(draw)) + "7") for _ in range(ROWS)]
    rows = [{"prompt": prompt, "answer": answer, "images": []} for prompt, answer in texts]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = DataConfig(train_files=str(file), skip_bad_rows=True, max_prompt_length=100_000)
    return ProblemSet(str(file), ProblemRules.of(config), tiny_processing)


def control_tokens(processing: Processing, prompt: EncodedPrompt) -> Counter[int]:
    added = set(processing.tokenizer.added_tokens_decoder)
    return Counter(token for token in prompt.token_ids if token in added)


def plain(processing: Processing) -> Counter[int]:
    """The control tokens of an ordinary question."""
    return control_tokens(processing, processing.encode("Find x.", None))


@pytest.mark.heavy
@pytest.mark.parametrize("placement", ["user_suffix", "assistant_prefix"])
def test_rows_and_answers_reach_teachers_as_plain_text(
    problems: ProblemSet, pool: RewardPool, tiny_processing: Processing, placement: Any
) -> None:
    assert len(problems) > ROWS / 2
    draw, expected = random.Random(2), plain(tiny_processing)
    contexts = ContextBuilder(tiny_processing, TeacherConfig(placement=placement), max_context_length=100_000)
    estimator = build_estimator("cepo", {"teacher": {"placement": placement}})
    shown = 0
    for problem in problems:
        prompt = contexts.student(problem)
        assert control_tokens(tiny_processing, prompt) == expected, repr(problem.text)
        responses = [rf"{hostile_text(draw)} \boxed{{{hostile_text(draw, pieces=3)}}}" for _ in range(4)]
        tokens, rewards = [(5, 6)] * 4, [1.0, 0.0, 0.0, 0.0]
        rollouts = rollouts_of(tokens, rewards, problems=[problem], prompts=[prompt], responses=responses)
        groups = rollout_groups(rollouts, pool, tiny_processing, seed=1)
        views, _ = plan_views(rollouts, torch.ones(4, dtype=torch.bool), groups, estimator, contexts)
        for view in views:
            for row, scored in view.rows.items():
                shown += 1
                assert control_tokens(tiny_processing, scored.context) == expected, repr(view.references[row])
                reference = view.references[row]
                assert reference is not None
                assert not any(special in reference for special in tiny_processing.special_texts)
                assert reference.isprintable()
    assert shown > len(problems), "hardly any reference was shown"


def test_template_code_and_markup_are_shown_as_they_are_written(tiny_processing: Processing) -> None:
    contexts = ContextBuilder(tiny_processing, TeacherConfig(), max_context_length=10_000)
    text, reference = "{{ 7 * 7 }}{% raw %}<b>&lt;</b>", "{{ prompt.__class__ }} <script>${oc.env:HOME}"
    problem = Problem(prompt_id="0", text=text, images=(), ground_truth="7", solution=None, columns={})
    teacher = contexts.teacher(problem, contexts.student(problem), reference)
    assert f"{text}\nHere is a sample answer: {reference}" in tiny_processing.decode(teacher.token_ids)


@pytest.mark.heavy
@pytest.mark.parametrize(("unit", "size"), [("x", MEGABYTE), *((unit, 50_000) for unit in UNITS)])
def test_a_line_of_a_megabyte_is_encoded_in_seconds(tiny_processing: Processing, unit: str, size: int) -> None:
    text = unit * (size // len(unit))
    began = time.process_time()
    prompt = tiny_processing.encode(text, None)
    assert control_tokens(tiny_processing, prompt) == plain(tiny_processing)
    tiny_processing.encode_text(sanitise_reference(text, tiny_processing.special_texts))
    assert time.process_time() - began < 60


def test_a_hundred_thousand_image_marks_are_a_bad_row_at_once(tiny_processing: Processing, tmp_path: Path) -> None:
    file = tmp_path / "marks.jsonl"
    file.write_text(json.dumps({"prompt": MARKS[0] * 100_000, "answer": "1", "images": []}) + "\n", encoding="utf-8")
    began = time.process_time()
    with pytest.raises(DataError, match=r"row 0: 100000 '<image>' in the text but 0 images"):
        ProblemSet(str(file), ProblemRules.of(DataConfig(train_files=str(file))), tiny_processing)
    assert time.process_time() - began < 20
