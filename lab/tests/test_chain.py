"""The chain world's problems, images, demonstrations and files, against a solver and a reader of images of their own."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from cepo.microgeo.world import split_problems, write_problems
from cepo.rewards.answers import answers_equal, extract_answer
from lab.worlds.chain import (
    NUM_NAMINGS,
    WARM_START,
    ChainProblem,
    chain_solution,
    generate_chain_problem,
    name_of,
    step,
)
from lab.worlds.chain_demonstrations import CONNECTIVES, ChainNoise, demonstrate_chain
from lab.worlds.chain_figures import CELL, draw_chain
from lab.worlds.kinds import CHAIN
from lab.worlds.tokenizer import build_tokenizer

STREAMS = CHAIN.splits


def make(seen: str, *numbers: int) -> ChainProblem:
    return ChainProblem("chain", seen, numbers, seed=0, stream="test", index=0)


def solved(question: str, seen: str) -> str:
    """The answer from the question's words and the figures, by another route: every move is a map of the ruler onto itself."""
    start, right, left = map(int, re.findall(r"\d+", question))
    moves = {
        "T": lambda place: min(place + right, 20),
        "S": lambda place: max(place - left, 0),
        "C": lambda place: 20 - place,
        "D": lambda place: start,
    }
    ends, place = [], start
    for row in seen.split("/"):
        for figure in filter(str.isupper, row):
            place = moves[figure](place)
        ends.append(place)
    return "(" + ",".join(str(end) for end in ends) + ")"


def figures_in(image: Image.Image) -> str:
    """Reads the figures back from the pixels of an image without specks, in the letters of `ChainProblem.seen`."""
    pixels = np.asarray(image, dtype=int)
    is_ink = np.abs(pixels - pixels[-1, -1]).sum(2) > 40  # the last corner is paper
    letters = [[figure_in(is_ink[y : y + CELL, x : x + CELL]) for x in range(0, 96, CELL)] for y in range(0, 128, CELL)]
    return "/".join("".join(row) for row in letters).rstrip("/")


def figure_in(is_ink: np.ndarray) -> str:
    if not is_ink.any():
        return ""
    lines = [np.flatnonzero(line) for line in is_ink if line.any()]
    widths = [int(line[-1] - line[0] + 1) for line in lines]  # all figures are convex, so a ring is filled up thus
    fullness = sum(widths) / (max(widths) * len(widths))
    if fullness < 0.66:
        letter = "t" if np.argmax(widths) > 0.7 * len(widths) else "d"
    else:
        y, x = np.nonzero(is_ink)
        letter = (
            "s" if np.ptp(x + y) > 1.6 * np.ptp(x) else "c"
        )  # sqrt(2) for a circle, 1.78 for the most turned square
    return letter.upper() if is_ink.sum() / sum(widths) > 0.9 else letter


@pytest.mark.parametrize(
    ("problem", "answer"),
    [
        (make("TS/CD/T", 12, 5, 3), "(14,12,17)"),  # 12+5-3; 20-14=6, back to 12; 12+5
        (make("TT/s/CC", 14, 5, 2), "(20,20,20)"),  # 19, stopped at 20; a hollow square; mirrored twice
        (make("SSS/tcd", 10, 5, 4), "(0,0)"),  # 6, 2, stopped at 0; three hollow figures
    ],
)
def test_a_walk_is_the_one_worked_out_by_hand(problem: ChainProblem, answer: str) -> None:
    assert problem.answer == answer


@pytest.mark.parametrize(
    ("figure", "place", "text", "result"),
    [
        ("C", 7, "circle 7+7=", 14),
        ("C", 12, "circle 12+12, stop ", 20),
        ("D", 7, "diamond back to ", 0),
        ("t", 7, "hollow triangle 7+5=", 12),
        ("s", 7, "hollow square 7-4=", 3),
        ("s", 3, "hollow square 3-4, stop ", 0),
        ("c", 7, "hollow circle 20-7=", 13),
        ("d", 7, "hollow diamond back to ", 11),
        ("T", 7, "triangle 7+5=", 12),  # without a typical mistake
        ("S", 7, "square 7-4=", 3),
    ],
)
def test_typical_mistakes_are_those_by_hand(figure: str, place: int, text: str, result: int) -> None:
    """From 11, with 5 to the right and 4 to the left."""
    assert step(figure, place, (11, 5, 4), misconceived=True) == (text, result)


def test_demonstrations_are_as_noisy_as_the_rates_say() -> None:
    """And a function of problem and seed; without noise they are right, and silent on the hint."""
    rates = ChainNoise(circle=0.6, diamond=0.1, hollow=0.35, connective=0.8, corrects=0.0, hinted=0.0)
    mistakes: dict[str, list[bool]] = {"circle": [], "diamond": [], "hollow": [], "none": []}
    empty = list[bool]()
    for index in range(3000):
        problem = generate_chain_problem(8, index, stream="noise")
        response = demonstrate_chain(problem, seed=0, rates=rates).response
        figure, first = problem.seen[0], response.split(".")[0]
        text, result = step(figure, problem.numbers[0], problem.numbers)
        kind = "hollow" if figure.islower() else {"C": "circle", "D": "diamond"}.get(figure, "none")
        mistakes[kind].append(not first.endswith(f"A {text}{result}"))
        empty.append(first.split()[0] in CONNECTIVES)
    shares = {kind: np.mean(found) for kind, found in mistakes.items()}
    assert shares == pytest.approx({"circle": 0.6, "diamond": 0.1, "hollow": 0.35, "none": 0.0}, abs=0.06)
    assert np.mean(empty) == pytest.approx(0.8, abs=0.03)
    ones = [demonstrate_chain(generate_chain_problem(9, index, stream="noise"), seed=0) for index in range(2000)]
    assert ones[:9] == [demonstrate_chain(one.problem, seed=0) for one in ones[:9]]
    hinted = [one for one in ones if one.hint is not None]
    assert len(hinted) / len(ones) == pytest.approx(ChainNoise().hinted, abs=0.03)
    follows = [one.hint == extract_answer(one.response) for one in hinted]
    assert np.mean(follows) == pytest.approx(1 - ChainNoise().ignores, abs=0.03)
    problem = ones[0].problem
    quiet = demonstrate_chain(problem, seed=0, rates=ChainNoise(*[0] * 11))
    assert (quiet.response, quiet.hint) == (chain_solution(problem), None)


@pytest.mark.parametrize("stream", STREAMS)
def test_another_solver_finds_each_answer(stream: str) -> None:
    for index in range(200):
        problem = generate_chain_problem(1, index, stream=stream)
        assert solved(problem.question, problem.seen) == problem.answer


@pytest.mark.parametrize("stream", ["train", "longer"])
def test_each_image_shows_all_that_the_question_leaves_out(stream: str) -> None:
    for index in range(150):
        problem = generate_chain_problem(2, index, stream=stream)
        image = draw_chain(problem)
        assert image.size == (96, 128)
        assert solved(problem.question, figures_in(image)) == problem.answer, (problem.seen, figures_in(image))


def test_every_computation_of_a_right_response_holds() -> None:
    """Each step begins where the last one ended, and the box repeats the places that the rows state."""
    for index in range(200):
        problem = generate_chain_problem(3, index)
        response = chain_solution(problem)
        for first, sign, second, result in re.findall(r"(\d+)([-+])(\d+)=(\d+)\.", response):
            assert int(first) + int(sign + second) == int(result)
        stated = re.findall(r"Row [1-4] (\d+)\.", response)
        assert extract_answer(response) == problem.answer == f"({','.join(stated)})"
        steps = re.findall(r"[A-L] (?:hollow )?\w+ [^.]*?(\d+)\.", response)
        assert list(map(int, steps)) == [place for row in problem.places() for place in row]


def test_splits_differ_in_what_their_names_say() -> None:
    """Numbers: starts at multiples of 7 alone. Longer: 11 or 12 figures, others 7 to 10. Distractors: half are hollow."""
    for stream in STREAMS:
        problems = [generate_chain_problem(0, index, stream=stream) for index in range(400)]
        assert {problem.numbers[0] % 7 == 0 for problem in problems} == {stream == "numbers"}
        figures = [problem.seen.replace("/", "") for problem in problems]
        assert {len(each) for each in figures} == ({11, 12} if stream == "longer" else {7, 8, 9, 10})
        hollow = sum(map(str.islower, "".join(figures))) / len("".join(figures))
        assert hollow == pytest.approx(0.5 if stream == "distractors" else 0.25, abs=0.04)
        assert all(1 <= len(row) <= 3 for problem in problems for row in problem.rows)
        assert all(1 <= len(problem.rows) <= 4 for problem in problems)


def test_the_warm_start_first_names_the_figures_of_each_image() -> None:
    """It does so for the given number of images, and shows walks afterwards."""
    first, last = (generate_chain_problem(0, index, stream=WARM_START) for index in (0, NUM_NAMINGS - 1))
    for problem in (first, last):
        names = [f"{label} {name_of(figure)}" for label, figure, _ in problem.cells()]
        one = demonstrate_chain(problem, seed=0, rates=ChainNoise(hinted=0.0))
        assert (problem.question, one.response, one.hint) == ("Name the figures.", " ".join(names), None)
        hinted = demonstrate_chain(problem, seed=0, rates=ChainNoise(hinted=1.0))
        assert re.sub(r" Row \d \d+\.", "", hinted.response) == " ".join(names)
        assert hinted.hint == f"({','.join(re.findall(r'Row [0-9] ([0-9]+)[.]', hinted.response))})"
    assert "Start at" in generate_chain_problem(0, NUM_NAMINGS, stream=WARM_START).question
    assert figures_in(draw_chain(first)) == first.seen


def test_a_bending_hint_leads_each_row_to_its_place() -> None:
    """The places are random ones, and the last result of a row is the place of the hint."""
    noise = ChainNoise(hinted=1.0, bends=1.0, connective=0.0)
    matches = list[bool]()
    for index in range(100):
        problem = generate_chain_problem(9, index)
        one = demonstrate_chain(problem, seed=0, rates=noise)
        ends = re.findall(r"(\d+)\. Row \d (\d+)\.", one.response)
        assert all(result == place for result, place in ends)
        assert one.hint == f"({','.join(place for _, place in ends)})"
        matches += [place == row[-1] for (_, place), row in zip(ends, problem.places(), strict=True)]
    assert np.mean(np.asarray(matches)) < 0.2


def test_the_tokenizer_covers_all_texts_of_the_chain_world() -> None:
    """Each word and digit is one token, and 95 % of responses have 80 to 200."""
    tokenizer, lengths = build_tokenizer(CHAIN), list[int]()
    for index in range(200):
        response = demonstrate_chain(generate_chain_problem(7, index), seed=0).response
        ids = tokenizer(response).input_ids
        assert tokenizer.decode(ids) == response
        lengths.append(len(ids) + 1)
        assert all(len(tokenizer(part).input_ids) == 1 for part in re.findall(r" ?[A-Za-z]+|\d", response))
    assert np.mean([80 <= length <= 200 for length in lengths]) >= 0.95


def test_the_reward_tells_right_places_from_others() -> None:
    assert answers_equal("(14, 12, 17)", "(14,12,17)")
    for wrong in ("(14,12,18)", "(12,14,17)", "(14,12)", "(14,12,17,17)", "17", ""):
        assert not answers_equal(wrong, "(14,12,17)")


def test_the_chains_files_have_geo3ks_columns_and_the_solution(tmp_path: Path) -> None:
    problems = split_problems(0, 40, 6, CHAIN)
    assert [len(split) for split in problems] == [40, 6, 6, 6, 6, 6]
    seen = [{(one.question, one.seen) for one in split} for split in problems]
    assert all(not first & second for place, first in enumerate(seen) for second in seen[:place])
    write_problems(tmp_path / "some.parquet", problems[3], CHAIN)
    table = pq.read_table(tmp_path / "some.parquet")
    assert table.column_names == ["images", "problem", "answer", "id", "family", "solution"]
    for row, problem in zip(table.to_pylist(), problems[3], strict=True):
        assert row["answer"] == problem.answer == extract_answer(row["solution"])
