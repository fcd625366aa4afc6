"""The arithmetic of a step on eight cards."""

from __future__ import annotations

import pytest

from lab.eight_cards import Lengths, ahead_on_separate_cards, ahead_on_the_same_cards, sampling, synchronous

EQUAL = Lengths(has_tail=False)


def test_one_card_with_the_measured_work_takes_the_measured_time() -> None:
    """5.6 s of sampling, 6.3 of scoring and update, 0.5 of the rest."""
    assert sampling(256, 1, EQUAL).seconds() == pytest.approx(5.6, abs=0.01)
    assert synchronous(256, EQUAL, num_cards=1) == pytest.approx(12.4, abs=0.01)


def test_a_card_with_fewer_responses_keeps_the_fixed_cost() -> None:
    """512 positions of 6.8 ms are 3.48 s, and an eighth of the other 2.12 s is 0.26 s."""
    assert sampling(256, 8, EQUAL).seconds() == pytest.approx(3.75, abs=0.01)


def test_training_beside_sampling_takes_what_the_host_leaves_idle() -> None:
    """Of 5.6 s the card is idle for 512 x 2 ms. 5.6 - 1.02 + 6.3 + 0.5 = 11.38 s, and 12.4 one after the other."""
    assert ahead_on_the_same_cards(2048, EQUAL, lag=1) == pytest.approx(11.38, abs=0.01)


def test_the_best_split_of_eight_cards_is_found() -> None:
    """Three cards sample 683 responses each in 3.48 + 2.12 x 683 / 256 = 9.1 s; five train for 6.3 x 8 / 5 = 10.1 s."""
    seconds, num_sampling = ahead_on_separate_cards(2048, EQUAL, lag=1)
    assert num_sampling == 3
    assert seconds == pytest.approx(10.58, abs=0.01)


def test_two_batches_in_flight_halve_the_cost_of_the_longest() -> None:
    """The longest of 256 has 2,048 tokens: 13.93 s of positions become 6.96."""
    own = sampling(256, 8, Lengths(has_tail=True))
    assert own.positions == 2048
    assert own.seconds() - own.seconds(lag=2) == pytest.approx(6.96, abs=0.01)
