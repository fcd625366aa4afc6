"""Which problems a step asks where several training sets are mixed."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cepo.data.dataset import weighted_indices


def asked(steps: range, **settings: object) -> list[tuple[int, int]]:
    usual: dict[str, object] = {"shuffle": True, "seed": 1, "batch_size": 4}
    return [each for step in steps for each in weighted_indices(step, **(usual | settings))]  # pyright: ignore[reportArgumentType]


def test_weights_3_and_1_take_3_of_4_problems_from_the_first_set() -> None:
    """The share of 4,000 independent draws has a standard deviation of sqrt(0.75 * 0.25 / 4000) = 0.007."""
    counts = Counter(part for part, _ in asked(range(1000, 2000), sizes=[7, 5], weights=[3, 1]))
    assert abs(counts[0] / 4000 - 0.75) < 4 * 0.007


def test_each_pass_of_a_set_asks_each_problem_once() -> None:
    both = asked(range(10), sizes=[10, 5], weights=[0.5, 0.5], batch_size=6)
    for chosen, size in ((0, 10), (1, 5)):
        asked_of_set = [index for part, index in both if part == chosen]
        passes = [asked_of_set[start : start + size] for start in range(0, len(asked_of_set) - size, size)]
        assert len(passes) >= 2
        assert all(sorted(one) == list(range(size)) for one in passes)
        assert passes[0] != passes[1]


def test_without_shuffling_sets_are_asked_in_their_own_order() -> None:
    both = asked(range(6), sizes=[4, 3], weights=[1, 1], shuffle=False)
    for chosen, size in ((0, 4), (1, 3)):
        indices = [index for part, index in both if part == chosen]
        assert len(indices) > size
        assert indices == [number % size for number in range(len(indices))]


@given(st.integers(0, 30), st.integers(0, 5))
def test_a_resumed_run_asks_the_same_problems(step: int, seed: int) -> None:
    settings = {"sizes": [7, 3, 5], "weights": [1, 2, 4], "seed": seed}
    whole = asked(range(step + 1), **settings)
    assert asked(range(step, step + 1), **settings) == whole[-4:]
