"""Computes the Monte-Carlo truth: `V_t`, the probability that a continuation is correct, and `A*_t = V_{t+1} - V_t`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from cepo.credit.continuations import Continued
from cepo.credit.prefixes import prefix_of
from cepo.trainer.asking import Rollouts

Numbers = NDArray[numpy.float64]


@dataclass(frozen=True, kw_only=True)
class Truth:
    """The truth about the N measured tokens, ordered by response.

    Attributes:
        problem: (N,) number of the token's problem.
        row: (N,) row of its response among the rollouts.
        token: (N,) its position in the response.
        value: (N,) V before the token.
        credit: (N,) A* of the token. After a response's last token, V is the response's own verdict.
        value_halves, credit_halves: (2, N) the same from even and odd continuations, whose noise is independent.
        entropy: (N,) entropy in nats of the distribution from which the token was sampled.
    """

    problem: NDArray[numpy.int64]
    row: NDArray[numpy.int64]
    token: NDArray[numpy.int64]
    value: Numbers
    credit: Numbers
    value_halves: Numbers
    credit_halves: Numbers
    entropy: Numbers


def assemble(rollouts: Rollouts, chosen: Mapping[int, Sequence[int]], continued: Mapping[str, Continued]) -> Truth:
    """Computes the truth about the chosen tokens from the verdicts on continuations."""
    places = [(row, token) for row, tokens in chosen.items() for token in tokens]

    def values(row: int, length: int) -> Numbers:
        """V before token `length`, and its two halves; after the last token the response's own verdict."""
        if length == len(rollouts.generations[row].response_ids):
            return numpy.full(3, float(rollouts.correct[row]))
        right = numpy.array(continued[prefix_of(rollouts, row, length).name].verdicts, dtype=float)
        return numpy.array([right.mean(), right[0::2].mean(), right[1::2].mean()])

    before = numpy.array([values(row, token) for row, token in places]).T
    after = numpy.array([values(row, token + 1) for row, token in places]).T
    rows = numpy.array([row for row, _ in places])
    return Truth(
        problem=rows // rollouts.group_size,
        row=rows,
        token=numpy.array([token for _, token in places]),
        value=before[0],
        credit=(after - before)[0],
        value_halves=before[1:],
        credit_halves=(after - before)[1:],
        entropy=numpy.array([continued[prefix_of(rollouts, row, token).name].entropy for row, token in places]),
    )
