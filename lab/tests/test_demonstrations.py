"""The demonstrations that the shipped model was taught with."""

from __future__ import annotations

import operator
import re

import pytest

from cepo.microgeo.problems import ToyProblem, generate_problem
from lab.worlds.demonstrations import right_response, solve


def make(family: str, seen: str, *numbers: int, index: int = 0) -> ToyProblem:
    return ToyProblem(family, seen, numbers, seed=0, stream="test", index=index)


@pytest.mark.parametrize(
    ("problem", "answer", "misconceived"),
    [
        (make("perimeter", "5", 7), 35, 12),  # a pentagon of side 7; 5 + 7
        (make("perimeter", "3", 12), 36, 15),
        (make("angle", "3", 48, 72), 60, 240),  # 180 - 120; 360 - 120
        (make("angle", "4", 48, 72), 120, 210),  # (360 - 120) / 2; (540 - 120) / 2
        (make("angle", "5", 48, 72), 140, 200),  # (540 - 120) / 3; (720 - 120) / 3
        (make("ticks", "6", 4), 24, 28),  # 6 * 4; 7 * 4
        (make("ticks", "2", 15), 30, 45),
        (make("fence", "width", 17, 12), 41, 29),  # one width of 17, two heights of 12; 17 + 12
        (make("fence", "height", 17, 12), 46, 29),  # two widths of 17, one height of 12
    ],
)
def test_answers_right_and_misconceived_are_worked_out_by_hand(
    problem: ToyProblem, answer: int, misconceived: int
) -> None:
    assert problem.answer == str(answer)
    assert solve(problem, misconceived=True)[-1][1] == misconceived


def test_every_result_of_a_right_response_equals_its_left_side() -> None:
    operators = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
    for problem in (generate_problem(3, index) for index in range(400)):
        response = right_response(problem)
        computations = re.findall(r"(\d+)([-+*/])(\d+)=(\d+)\.", response)
        assert computations
        assert all(
            operators[sign](int(first), int(second)) == int(result) for first, sign, second, result in computations
        )
        assert response.endswith(f"={problem.answer}. \\boxed{{{problem.answer}}}")
