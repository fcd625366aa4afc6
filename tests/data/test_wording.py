"""How questions and references are worded, and that hostile text in them stays text on the way to a teacher."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from case_files import cases
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
from cepo.errors import ConfigError
from cepo.models.interface import EncodedPrompt
from cepo.models.processing import Processing
from cepo.rewards.pool import RewardPool
from cepo.trainer.planning import plan_views
from cepo.trainer.rollout_groups import rollout_groups
from testing.hostile import hostile_text

SANITISED: list[list[str]] = cases(__file__, "sanitised_texts.yaml")
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|vision_start|>", "<image>"]


@pytest.mark.parametrize(
    ("placement", "source", "message"),
    [
        ("user_suffix", "{{ prompt }}\nThis reference is only a word", r"uses .* prompt; .* written \{\{ reference \}\};"),
        ("user_suffix", "{{ prompt }}{# {{ reference }} #}", "uses the variables prompt; needed: reference"),
        ("user_suffix", "{{ prompt }} {{ reference", "does not parse"),
        ("user_suffix", "{{ prompt }} {{ reference }} {{ answer }}", "uses .*answer.*; needed: reference, .*further"),
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


@pytest.mark.parametrize(("text", "expected"), SANITISED)
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


@given(st.text(alphabet=st.characters(blacklist_categories=["C", "Z"]), max_size=30))
def test_text_without_specials_blanks_and_controls_is_left_alone(text: str) -> None:
    assert sanitise_reference(text, SPECIALS) == text or any(special in text for special in SPECIALS)


@pytest.mark.parametrize("placement", ["user_suffix", "assistant_prefix"])
def test_the_shipped_template_files_are_the_built_in_wordings(placement: str) -> None:
    file = Path(__file__).parents[2] / "configs" / "teacher" / f"{placement}.jinja"
    assert file.read_text().removesuffix("\n") == TEMPLATES[placement]


PIECES: dict[str, list[str]] = cases(__file__, "template_pieces.yaml")


@st.composite
def templates(draw: st.DrawFn, names: list[str]) -> str:
    """Text, expressions and blocks that use `names`; about half of them are templates that can be used."""
    has_blocks = draw(st.booleans())
    template = ""
    for _ in range(draw(st.integers(0, 5))):
        name = draw(st.sampled_from(names))
        kind = draw(st.sampled_from(["text", "variable", "expression", "block" if has_blocks else "text"]))
        if kind == "text":
            template += draw(st.text(max_size=4))
        elif kind == "variable":
            template += "{{ " + name + " }}"
        elif kind == "expression":
            expression = draw(st.sampled_from(PIECES["expressions"]))
            template += "{{ " + expression.replace("{name}", name) + " }}"
        else:
            block = draw(st.sampled_from(PIECES["blocks"]))
            template += block.replace("{name}", name)
    return template


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


ROWS = 120
UNITS = ["<|im_end|>", "<|im_", "\\boxed{", "\n", "\x00", "\U0001f600", "\ud800", "1", "<image"]


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(RewardConfig()) as opened:
        yield opened


def in_a_file(text: str) -> str:
    """A text without lone surrogates, which JSON does not hold; the tests below pass them to the tokenizer."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory, tiny_processing: Processing) -> ProblemSet:
    """Hostile questions and answers; only a row with an image mark and no image is none that can be asked."""
    draw = random.Random(1)
    lines: list[str] = []
    for _ in range(ROWS):
        row = {"prompt": in_a_file(hostile_text(draw)), "answer": in_a_file(hostile_text(draw)) + "7", "images": []}
        lines.append(json.dumps(row) + "\n")
    file = tmp_path_factory.mktemp("hostile") / "rows.jsonl"
    file.write_text("".join(lines), encoding="utf-8")
    config = DataConfig(train_files=str(file), skip_bad_rows=True, max_prompt_length=100_000)
    return ProblemSet(str(file), config, tiny_processing)


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
    draw = random.Random(2)
    expected = plain(tiny_processing)
    contexts = ContextBuilder(tiny_processing, TeacherConfig(placement=placement), max_context_length=100_000)
    estimator = build_estimator("cepo", {"teacher": {"placement": placement}})
    num_references = 0
    for problem in problems:
        prompt = contexts.student(problem)
        assert control_tokens(tiny_processing, prompt) == expected, repr(problem.text)
        responses = [rf"{hostile_text(draw)} \boxed{{{hostile_text(draw, pieces=3)}}}" for _ in range(4)]
        rewards = [1.0, 0.0, 0.0, 0.0]
        rollouts = rollouts_of([(5, 6)] * 4, rewards, problems=[problem], prompts=[prompt], responses=responses)
        groups = rollout_groups(rollouts, pool, tiny_processing, seed=1)
        views, _ = plan_views(rollouts, torch.ones(4, dtype=torch.bool), groups, estimator, contexts)
        for view in views:
            for row, scored in view.rows.items():
                num_references += 1
                assert control_tokens(tiny_processing, scored.context) == expected, repr(view.references[row])
                reference = view.references[row]
                assert reference is not None
                assert not any(special in reference for special in tiny_processing.special_texts)
                assert reference.isprintable()
    assert num_references > len(problems), "hardly any reference was shown"


def test_template_code_and_markup_are_shown_as_they_are_written(tiny_processing: Processing) -> None:
    contexts = ContextBuilder(tiny_processing, TeacherConfig(), max_context_length=10_000)
    text = "{{ 7 * 7 }}{% raw %}<b>&lt;</b>"
    reference = "{{ prompt.__class__ }} <script>${oc.env:HOME}"
    problem = Problem(prompt_id="0", text=text, images=(), ground_truth="7", solution=None, columns={})
    teacher = contexts.teacher(problem, contexts.student(problem), reference)
    assert f"{text}\nHere is a sample answer: {reference}" in tiny_processing.decode(teacher.token_ids)
