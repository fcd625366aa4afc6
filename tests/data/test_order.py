"""Which problems a step asks where several training sets are mixed."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cepo.data.order import weighted_indices


def asked(steps: range, **settings: object) -> list[tuple[int, int]]:
    usual: dict[str, object] = {"shuffle": True, "seed": 1, "batch_size": 4}
    return [each for step in steps for each in weighted_indices(step, **(usual | settings))]  # pyright: ignore[reportArgumentType]


def test_weights_3_and_1_take_3_of_4_problems_from_the_first_set() -> None:
    for step in range(20):
        counts = Counter(part for part, _ in asked(range(step, step + 1), sizes=[7, 5], weights=[3, 1]))
        assert counts == {0: 3, 1: 1}


def test_each_pass_of_a_set_asks_each_problem_once() -> None:
    both = asked(range(10), sizes=[10, 5], weights=[0.5, 0.5], batch_size=6)
    first = [index for part, index in both if part == 0]
    assert [sorted(first[start : start + 10]) for start in (0, 10, 20)] == [list(range(10))] * 3
    assert first[:10] != first[10:20]
    second = [index for part, index in both if part == 1]
    assert [sorted(second[start : start + 5]) for start in range(0, 30, 5)] == [list(range(5))] * 6


def test_without_shuffling_sets_are_asked_in_their_own_order() -> None:
    both = asked(range(2), sizes=[4, 3], weights=[1, 1], shuffle=False)
    assert [index for part, index in both if part == 0] == [0, 1, 2, 3]
    assert [index for part, index in both if part == 1] == [0, 1, 2, 0]


@given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=5),
    st.integers(1, 9),
    st.integers(0, 40),
)
def test_after_any_step_each_set_has_had_its_share(weights: list[float], batch_size: int, steps: int) -> None:
    sizes = [11] * len(weights)
    counts = Counter(
        part for part, _ in asked(range(steps), sizes=sizes, weights=weights, batch_size=batch_size, shuffle=False)
    )
    for part, weight in enumerate(weights):
        assert abs(counts[part] - steps * batch_size * weight / sum(weights)) < len(weights)


@given(st.integers(0, 30), st.integers(0, 5))
def test_a_resumed_run_asks_the_same_problems(step: int, seed: int) -> None:
    settings = {"sizes": [7, 3, 5], "weights": [1, 2, 4], "seed": seed}
    whole = asked(range(step + 1), **settings)
    assert asked(range(step, step + 1), **settings) == whole[-4:]
