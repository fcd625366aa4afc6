"""The Monte-Carlo truth about tokens: `V_t`, the chance that a continuation is right, and `A*_t = V_{t+1} - V_t`."""

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
    """The measured tokens, one entry each, response by response. N tokens.

    Attributes:
        problem: (N,) number of the token's problem.
        row: (N,) row of its response among the rollouts.
        token: (N,) its place in the response.
        value: (N,) V before the token.
        credit: (N,) A* of the token; for a response's last token the verdict stands for the V after it.
        value_halves, credit_halves: (2, N) the same from every second continuation, whose noise is independent.
        entropy: (N,) of the next token before the token, in nats.
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
    """Puts verdicts on continuations together to the truth about the chosen tokens."""
    places = [(row, token) for row, tokens in chosen.items() for token in tokens]

    def values(row: int, length: int) -> Numbers:
        """V before token `length`, and its two halves; the verdict itself behind the last token."""
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
