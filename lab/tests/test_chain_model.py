"""The chain world's shipped model keeps its promises: room to learn, steps that read the image, answers that a hint moves."""

from __future__ import annotations

import re

import numpy as np
import pytest
from shipped_model import Evaluator, Rollout, accuracy, mixed_fraction, shuffled_images

from cepo.microgeo.problems import Problem
from lab.worlds.chain import RULER, answer_text, generate_chain_problem
from lab.worlds.chain_demonstrations import CONNECTIVES
from lab.worlds.kinds import CHAIN
from lab.worlds.tokenizer import build_tokenizer

pytestmark = pytest.mark.heavy

NUM_PROBLEMS = 48
MAX_NEW_TOKENS = 256


@pytest.fixture(scope="module")
def evaluator() -> Evaluator:
    return Evaluator(CHAIN.assets, CHAIN, max_new_tokens=MAX_NEW_TOKENS)


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return [generate_chain_problem(0, index, stream="test") for index in range(NUM_PROBLEMS)]


@pytest.fixture(scope="module")
def groups(evaluator: Evaluator, problems: list[Problem]) -> list[list[Rollout]]:
    return evaluator.sample(problems, num_samples=8)


def test_the_weights_take_at_most_10_megabytes() -> None:
    assert sum(file.stat().st_size for file in CHAIN.assets.iterdir()) < 10_000_000


def test_the_chains_shipped_tokenizer_is_the_one_the_code_builds(evaluator: Evaluator) -> None:
    assert build_tokenizer(CHAIN).get_vocab() == evaluator.processor.tokenizer.get_vocab()


def test_the_chain_model_solves_20_to_50_percent(groups: list[list[Rollout]]) -> None:
    assert 0.20 <= accuracy(groups) <= 0.50


def test_half_of_the_chains_groups_are_mixed(groups: list[list[Rollout]]) -> None:
    assert mixed_fraction(groups) >= 0.5


def test_95_percent_of_walks_have_60_to_250_tokens(groups: list[list[Rollout]]) -> None:
    lengths = [one.length for group in groups for one in group]
    assert sum(60 <= length <= 250 for length in lengths) > 0.95 * len(lengths)


def test_the_greedy_walk_has_room(evaluator: Evaluator, problems: list[Problem]) -> None:
    assert accuracy(evaluator.sample(problems, num_samples=1, greedy=True)) <= 0.7


def test_walks_by_another_image_go_wrong(evaluator: Evaluator, problems: list[Problem]) -> None:
    images = shuffled_images(problems, CHAIN)
    assert accuracy(evaluator.sample(problems, num_samples=1, pictures=images)) <= 0.1


def test_a_hint_with_another_place_takes_from_the_last_result(
    groups: list[list[Rollout]], evaluator: Evaluator
) -> None:
    """Means of log P given the right answer minus log P given one with another last place, on right walks' last rows."""
    right = [one for group in groups for one in group if one.is_right]
    asked, responses = [one.problem for one in right], [one.response for one in right]
    plus = evaluator.log_probs(asked, responses, [problem.answer for problem in asked])
    minus = evaluator.log_probs(asked, responses, [other_end(problem) for problem in asked])
    results, filler = list[float](), list[float]()
    for response, toward, against in zip(responses, plus, minus, strict=True):
        (low, high) = [*re.finditer(r"(\d+)\. (?:[A-Z]\w+ )?Row \d", response)][-1].span(1)
        offsets = evaluator.processor.tokenizer(response, return_offsets_mapping=True).offset_mapping
        for (start, end), delta in zip(offsets, (toward - against).tolist(), strict=False):
            if start < high and end > low:
                results.append(delta)
            elif response[start:end].strip() in CONNECTIVES:
                filler.append(delta)
    assert np.mean(results) > 0.03
    assert np.mean(results) > 10 * abs(np.mean(filler))


def other_end(problem: Problem) -> str:
    """The answer with the last place 7 further, round the ruler's end."""
    *others, last = map(int, problem.answer.strip("()").split(","))
    return answer_text([*others, (last + 7) % (RULER + 1)])
