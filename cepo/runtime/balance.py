"""Which rank gets which group of rows. Pure: the standard library only, so that driver and tests may use it alike."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balance_groups(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Indices of the groups for each rank, ascending, so that the ranks' total costs are close to one another.

    Longest processing time first: groups by falling cost, each to the rank that has least so far; equal loads to the rank
    with fewer groups, then to the lower rank. The result is a function of the arguments alone. The largest load is at most
    `(4/3 - 1 / (3 num_ranks))` of the smallest one possible, and at most `mean load + (1 - 1 / num_ranks) max cost`.
    A group is never split; with fewer groups than ranks some ranks get none.

    Args:
        costs: of each group, for example its tokens; not negative.
        num_ranks: at least 1.
    """
    assert num_ranks >= 1, f"{num_ranks} ranks"
    assert all(cost >= 0 for cost in costs), "a cost is a count"
    groups: list[list[int]] = [[] for _ in range(num_ranks)]
    waiting = [(0, 0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        load, count, rank = heapq.heappop(waiting)
        groups[rank].append(index)
        heapq.heappush(waiting, (load + costs[index], count + 1, rank))
    return [sorted(group) for group in groups]
