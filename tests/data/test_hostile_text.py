"""Hostile text in rows and responses never becomes a special token, template code or markup, on the way to a teacher."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import rollouts_of

from cepo.algorithms import build_estimator
from cepo.algorithms.settings import TeacherConfig
from cepo.config.schema import DataConfig
from cepo.config.worker_schema import RewardConfig
from cepo.data.contexts import ContextBuilder, Problem, sanitise_reference
from cepo.data.dataset import ProblemSet
from cepo.errors import DataError
from cepo.models.inputs import EncodedPrompt
from cepo.models.processing import MARKS, Processing
from cepo.rewards.pool import RewardPool
from cepo.trainer.planning import plan_views, rollout_groups
from lab.support.hostile import hostile_text

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
        for view in plan_views(rollouts, torch.ones(4, dtype=torch.bool), groups, estimator, contexts):
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
        ProblemSet(str(file), DataConfig(train_files=str(file)), tiny_processing)
    assert time.process_time() - began < 20
