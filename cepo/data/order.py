"""Which problems a step asks: a pure function of (seed, step), so that stopping and resuming changes nothing."""

from __future__ import annotations

import random


def steps_per_epoch(num_problems: int, batch_size: int) -> int:
    """Full batches in one pass; the rest of a pass that fills no batch is left out, as in EasyR1."""
    return num_problems // batch_size


def problem_indices(step: int, *, num_problems: int, batch_size: int, shuffle: bool, seed: int) -> list[int]:
    """Indices of the problems of the 0-based `step`; each pass over the data has its own order."""
    per_epoch = steps_per_epoch(num_problems, batch_size)
    assert per_epoch > 0, "a batch must not be larger than the problem set; checked when the run is put together"
    epoch, place = divmod(step, per_epoch)
    order = list(range(num_problems))
    if shuffle:
        random.Random(f"{seed}/{epoch}").shuffle(order)
    return order[place * batch_size : (place + 1) * batch_size]
