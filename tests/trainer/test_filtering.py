"""Rounds of sampling under online filtering."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from factories import rollouts_of

from cepo.config.schema import AlgorithmConfig
from cepo.metrics import results
from cepo.trainer.asking import Rollouts, ask_until_enough


def rounds_mixed_from(first: int) -> Callable[[int], Rollouts]:
    """Rounds of one prompt with two responses, both wrong before round `first`, of which one is right from then on."""

    def next_round(before: int) -> Rollouts:
        return rollouts_of([(1,), (1,)], [float(before + 1 >= first), 0.0], num_raised=2, num_timed_out=1)

    return next_round


@pytest.mark.parametrize(
    ("max_rounds", "rounds_per_pass", "rounds", "filled"),
    [
        (20, 1, 20, 2), (40, 1, 26, 0), (1, 9, 2, 2),
        # Without a limit three passes over the data without a gain end it: 27 rounds reach the 25th, 24 do not.
        (0, 9, 26, 0), (-1, 9, 26, 0), (0, 8, 24, 2),
    ],
)  # fmt: skip
def test_rounds_are_asked_up_to_the_limit(max_rounds: int, rounds_per_pass: int, rounds: int, filled: int) -> None:
    """Without one, as long as 3 passes over the data keep a group."""
    rollouts = ask_until_enough(
        rounds_mixed_from(25), AlgorithmConfig(), num_groups=2, max_rounds=max_rounds, rounds_per_pass=rounds_per_pass
    )
    values = results(rollouts.metrics)
    assert (values["filter/rounds"], values["filter/filled_groups"]) == (rounds, filled)
    assert values["filter/kept_fraction"] == (2 - filled) / rounds, "a round has one group"
    assert rollouts.rewards.tolist() == ([0.0] * 4 if filled else [1.0, 0.0] * 2)
    failed = rollouts.num_raised, rollouts.num_timed_out
    assert failed == (2 * rounds, rounds), "failures of dropped groups count too"
