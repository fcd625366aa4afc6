"""The worlds: the chain world against a solver and a reader of images of their own, demonstrations, wording.

The oracle's values are compared with arithmetic by hand.
"""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from cepo.answers import marked_answer
from cepo.config.paths import MICROGEO_DATA
from cepo.microgeo.problems import generate_problem
from cepo.microgeo.world import SHAPES, split_problems, write_problems
from lab.studies.doses.training import _SHARES, demonstrate_worked
from lab.studies.support.chain_values import Chances, steps_of, token_advantages, values_along
from lab.studies.worlds.chain import (
    CELL,
    CONNECTIVES,
    NUM_NAMINGS,
    ChainNoise,
    ChainProblem,
    chain_solution,
    demonstrate_chain,
    draw_chain,
    generate_chain_problem,
    name_of,
    step,
)
from lab.studies.worlds.kinds import CHAIN
from lab.worlds.demonstrations import FORMAT_PROMPT, TEACHER_PROMPT, WARM_START, Demonstration, NoiseRates, demonstrate
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
    follows = [one.hint == marked_answer(one.response) for one in hinted]
    assert np.mean(follows) == pytest.approx(1 - ChainNoise().ignores, abs=0.03)
    problem = ones[0].problem
    quiet = demonstrate_chain(problem, seed=0, rates=ChainNoise(*[0] * 11))
    assert (quiet.response, quiet.hint) == (chain_solution(problem), None)


@pytest.mark.parametrize("stream", STREAMS)
def test_another_solver_finds_each_answer_in_the_image(stream: str) -> None:
    """Each image shows all that the question leaves out."""
    for index in range(150):
        problem = generate_chain_problem(1, index, stream=stream)
        image = draw_chain(problem)
        assert image.size == (96, 128)
        seen = figures_in(image) if stream in ("train", "longer") else problem.seen
        assert solved(problem.question, seen) == problem.answer, (problem.seen, seen)


def test_every_computation_of_a_right_response_holds() -> None:
    """Each step begins where the last one ended, and the box repeats the places that the rows state."""
    for index in range(200):
        problem = generate_chain_problem(3, index)
        response = chain_solution(problem)
        for first, sign, second, result in re.findall(r"(\d+)([-+])(\d+)=(\d+)\.", response):
            assert int(first) + int(sign + second) == int(result)
        stated = re.findall(r"Row [1-4] (\d+)\.", response)
        assert marked_answer(response) == problem.answer == f"({','.join(stated)})"
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


def test_the_chains_files_have_geo3ks_columns_and_the_solution(tmp_path: Path) -> None:
    problems = split_problems(0, 40, 6, CHAIN)
    assert [len(split) for split in problems] == [40, 6, 6, 6, 6, 6]
    seen = [{(one.question, one.seen) for one in split} for split in problems]
    assert all(not first & second for place, first in enumerate(seen) for second in seen[:place])
    write_problems(tmp_path / "some.parquet", problems[3], CHAIN)
    table = pq.read_table(tmp_path / "some.parquet")
    assert table.column_names == ["images", "problem", "answer", "id", "family", "solution"]
    for row, problem in zip(table.to_pylist(), problems[3], strict=True):
        assert row["answer"] == problem.answer == marked_answer(row["solution"])


SOLUTION = "A triangle 10+5=15. B diamond back to 10. Row 1 10. \\boxed{(10)}"
CHANCES = {"triangle": 0.6, "diamond": 0.5, "row": 1.0, "box": 1.0, "again": 0.2}


@pytest.mark.parametrize(
    ("response", "values"),
    [
        # After a right diamond 1, after a wrong one 0.2; so before it 0.5 + 0.5 * 0.2 = 0.6. After a wrong triangle
        # 0.2 * 0.6 + 0.8 * 0.5 = 0.52, for the diamond repairs the place; before it 0.6 * 0.6 + 0.4 * 0.52 = 0.568.
        (SOLUTION, [0.568, 0.6, 1, 1, 1]),
        ("So A triangle 10+5=14. B diamond back to 10. Row 1 10. \\boxed{(10)}", [0.568, 0.52, 1, 1, 1]),
        ("A triangle 10+5=15. B diamond back to 0. Row 1 0. \\boxed{(0)}", [0.568, 0.6, 0.2, 0, 0]),
        (
            "A triangle 10+5=15. B diamond back to 0. No, B diamond back to 10. Row 1 10. \\boxed{(10)}",
            [0.568, 0.6, 0.2, 1, 1, 1],
        ),
        ("A triangle 10+5=15. Row 1 15. \\boxed{(15)}", [0.568, 0.6, 0, 0]),
    ],
)
def test_the_worth_of_each_state_is_the_one_by_hand(response: str, values: list[float]) -> None:
    assert values_along(steps_of(response), steps_of(SOLUTION), CHANCES).values == pytest.approx(values)


def test_credit_is_on_what_decides_and_sums_to_reward_less_value() -> None:
    response = "So A triangle 10+5=15. Now B diamond back to 0. Row 1 0. \\boxed{(0)}"
    steps = steps_of(response)
    walk = values_along(steps, steps_of(SOLUTION), CHANCES)
    credits = token_advantages(steps, walk, list(response), 0.0)
    assert len(credits) == len(response) + 1  # the end token
    assert credits[response.index("10+")] == pytest.approx(0.6 - 0.568)
    assert credits[response.index("0. Row")] == pytest.approx(0.2 - 0.6)
    for start, end in (("So", " 10+"), (" Now", "0. Row")):
        assert not any(credits[response.index(start) : response.index(end)])
    # The step was wrong, and "No" instead of "Row" would have begun a correction.
    assert credits[response.index(" Row")] == pytest.approx(0 - 0.2)
    assert credits[-1] == 0.0
    changes = [credits[step.end - 1] for step in steps]
    assert sum(changes) == pytest.approx(0.0 - walk.values[0])


def test_a_misread_figure_has_its_credit_from_the_name_on() -> None:
    response = "A square 10-5=5. B diamond back to 10. Row 1 10. \\boxed{(10)}"
    steps = steps_of(response)
    credits = token_advantages(steps, values_along(steps, steps_of(SOLUTION), CHANCES), list(response), 1.0)
    assert credits[0] == 0.0
    assert credits[response.index("square")] == pytest.approx(0.52 - 0.568)


def test_values_counted_from_walks_are_calibrated_on_others() -> None:
    """In bins of predicted value, the share of right walks lies within 0.08 of the mean prediction."""
    chances, predicted, right = Chances(), [], []
    for index in range(1800):
        problem = generate_chain_problem(1, index)
        one = demonstrate_chain(problem, seed=0, rates=ChainNoise(hinted=0))
        walk = values_along(steps_of(one.response), steps_of(chain_solution(problem)), chances)
        is_right = one.response.endswith(f"{problem.answer}}}")
        assert walk.values[-1] == is_right
        if index < 600:
            chances.add(walk.outcomes, decay=1.0)
        else:
            predicted += walk.values
            right += [is_right] * len(walk.values)
    bins = np.digitize(predicted, [0.2, 0.4, 0.6, 0.8])
    for place in range(5):
        where = bins == place
        assert where.sum() > 100
        assert np.mean(np.array(right)[where]) == pytest.approx(np.mean(np.array(predicted)[where]), abs=0.08)


CONFIGS = Path(__file__).parents[3] / "configs"


def test_shapes_are_demonstrated_as_noisily_as_rates_say() -> None:
    """They are as often hinted as the rates say, too."""
    rates = NoiseRates()
    problems = [generate_problem(9, 4 * index, stream="noise") for index in range(2000)]
    ones = [demonstrate(problem, rates, seed=0) for problem in problems]
    assert ones == [demonstrate(problem, rates, seed=0) for problem in problems]
    for hinted, rate in ((False, rates.misread), (True, rates.misread_when_hinted)):
        misread = [one.response[0] != one.problem.seen for one in ones if (one.hint is not None) == hinted]
        assert np.mean(misread) == pytest.approx(rate, abs=0.03)
    assert np.mean([one.hint is not None for one in ones]) == pytest.approx(rates.hinted, abs=0.03)
    boxed = [re.search(r"boxed\{(\d+)\}", one.response).group(1) for one in ones]  # type: ignore[union-attr]
    follows = [one.hint == box for one, box in zip(ones, boxed, strict=True) if one.hint is not None]
    assert np.mean(follows) == pytest.approx(1 - rates.hint_is_ignored, abs=0.03)


def test_the_lab_teaches_the_wording_of_the_template_files() -> None:
    assert list(MICROGEO_DATA) == [f"microgeo:{split}" for split in SHAPES.splits]
    assert (CONFIGS / "format_prompt" / "microgeo.jinja").read_text().rstrip("\n") == FORMAT_PROMPT
    assert (CONFIGS / "teacher" / "user_suffix.jinja").read_text().rstrip("\n") == TEACHER_PROMPT


NUMBER = 300


@pytest.fixture(scope="module")
def shown() -> list[Demonstration]:
    return [demonstrate_worked(generate_chain_problem(5, number, stream="test"), seed=3) for number in range(NUMBER)]


def ends_of(text: str) -> str:
    return text.rpartition("\\boxed")[2]


def test_the_same_arguments_give_the_same_walk(shown: list[Demonstration]) -> None:
    assert demonstrate_worked(shown[7].problem, seed=3) == shown[7]
    assert demonstrate_worked(shown[7].problem, seed=4) != shown[7]


def test_walks_end_as_the_solution_in_view_does(shown: list[Demonstration]) -> None:
    """Of 20 steps a walk leaves one; a walk without a solution in view would be right in less than half."""
    right = [each for each in shown if ends_of(each.hint) == ends_of(chain_solution(each.problem))]
    assert len(right) / NUMBER == pytest.approx(_SHARES[0], abs=0.1)
    assert statistics.fmean(each.response.endswith(ends_of(each.hint)) for each in right) > 0.6
    others = [each for each in shown if each not in right]
    followed = statistics.fmean(ends_of(each.response) == ends_of(each.hint) for each in others)
    assert 0.1 < followed < 0.6, "wrong solutions of the problem are followed, those of other problems are not"
