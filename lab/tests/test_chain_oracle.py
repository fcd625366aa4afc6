"""The oracle of lab/: values of states against arithmetic by hand and against rollouts, and credit per token."""

from __future__ import annotations

import numpy as np
import pytest

from lab.support.chain_values import Chances, steps_of, token_advantages, values_along
from lab.worlds.chain import chain_solution, generate_chain_problem
from lab.worlds.chain_demonstrations import ChainNoise, demonstrate_chain

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
