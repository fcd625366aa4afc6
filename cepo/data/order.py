"""Chooses the problems of a step as a pure function of (seed, step), so that resuming a run changes nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache


def steps_per_epoch(num_problems: int, batch_size: int) -> int:
    """Returns the number of full batches in one pass; an incomplete last batch is dropped, as in EasyR1."""
    return num_problems // batch_size


def problem_indices(step: int, *, num_problems: int, batch_size: int, shuffle: bool, seed: int) -> list[int]:
    """Returns the indices of the problems of the 0-based `step`; each pass over the data has its own order."""
    per_epoch = steps_per_epoch(num_problems, batch_size)
    assert per_epoch > 0, "a batch must not be larger than the problem set; checked when the run is put together"
    epoch, place = divmod(step, per_epoch)
    order = list(range(num_problems))
    if shuffle:
        random.Random(f"{seed}/{epoch}").shuffle(order)
    return order[place * batch_size : (place + 1) * batch_size]


def weighted_indices(
    step: int, *, sizes: Sequence[int], weights: Sequence[float], batch_size: int, shuffle: bool, seed: int
) -> list[tuple[int, int]]:
    """Returns pairs (set, index in the set) for the 0-based `step`, with sets chosen in proportion to `weights`.

    After any number of problems, a set's count differs from its exact share by less than one problem plus one for each
    set before it in the list. Each set has its own epochs, with every problem once per epoch and a new order for each.
    """
    total = sum(map(Fraction, weights))
    shares = [Fraction(weight) / total for weight in weights]
    chosen: list[tuple[int, int]] = []
    for slot in range(step * batch_size, (step + 1) * batch_size):
        part, earlier = _turn(slot, shares)
        lap, place = divmod(earlier, sizes[part])
        chosen.append((part, _order(sizes[part], f"{seed}/{part}/{lap}")[place] if shuffle else place))
    return chosen


def _turn(slot: int, shares: Sequence[Fraction]) -> tuple[int, int]:
    """Returns the set that gets the 0-based `slot`, and the number of earlier slots of that set.

    A set with rate r gets floor(slot r) of the earlier slots; the remaining ones go to the sets after it.
    """
    left = Fraction(1)
    for part, share in enumerate(shares[:-1]):
        rate = share / left
        earlier = math.floor(slot * rate)
        if math.floor((slot + 1) * rate) > earlier:
            return part, earlier
        slot -= earlier
        left -= share
    return len(shares) - 1, slot


@lru_cache(maxsize=16)
def _order(size: int, seed: str) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(seed).shuffle(order)
    return tuple(order)
