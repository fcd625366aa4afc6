"""Chooses tokens and computes their truth: `V_t`, the chance of a right continuation, and `A*_t = V_{t+1} - V_t`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import numpy
from numpy.typing import NDArray
from pydantic import Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from cepo.algorithms import credit
from cepo.errors import DataError
from cepo.trainer.asking import Rollouts

Numbers = NDArray[numpy.float64]


@pydantic_dataclass(frozen=True, kw_only=True)
class Continued:
    """The continuations of one prefix, as stored."""

    prefix: str  # its name
    length: int  # of the prefix
    right: Annotated[str, Field(pattern="^[01]+$")]  # the verdict on each continuation
    entropy: float  # mean of -log P of the first tokens in nats, an unbiased estimate of the next token's entropy
    num_tokens: int  # of all continuations


@dataclass(frozen=True, kw_only=True)
class Truth:
    """The truth about the N measured tokens, ordered by response; after its last token, V is a response's own verdict.

    The halves, (2, N), are from even and odd continuations, whose noise is independent; all else is (N,).
    """

    problem: NDArray[numpy.int64]  # number of the token's problem
    row: NDArray[numpy.int64]  # of its response among the rollouts
    token: NDArray[numpy.int64]  # its position in the response
    value: Numbers  # V before the token
    credit: Numbers  # A* of the token
    value_halves: Numbers
    credit_halves: Numbers
    entropy: Numbers  # in nats, of the distribution from which the token was sampled

    @cached_property
    def entries(self) -> dict[int, NDArray[numpy.int64]]:
        """The measured tokens of each response, as indices into the arrays."""
        return {row: numpy.flatnonzero(self.row == row) for row in numpy.unique(self.row).tolist()}


def assemble(rollouts: Rollouts, chosen: Mapping[int, Sequence[int]], continued: Mapping[str, Continued]) -> Truth:
    """Computes the truth about the chosen tokens from the verdicts on continuations."""
    rows, tokens = numpy.array([(row, token) for row, tokens in chosen.items() for token in tokens]).T

    def values(row: int, length: int) -> Numbers:
        """V before token `length`, and its two halves; after the last token the response's own verdict."""
        if length == len(rollouts.generations[row].response_ids):
            return numpy.full(3, float(rollouts.correct[row]))
        right = numpy.array(list(continued[prefix_of(rollouts, row, length).name].right), dtype=float)
        return numpy.array([right.mean(), right[0::2].mean(), right[1::2].mean()])

    before, after = (numpy.array([*map(values, rows, tokens + more)]).T for more in (0, 1))
    prefixes = [prefix_of(rollouts, row, token) for row, token in zip(rows, tokens, strict=True)]
    return Truth(
        problem=rows // rollouts.group_size,
        row=rows,
        token=tokens,
        value=before[0],
        credit=(after - before)[0],
        value_halves=before[1:],
        credit_halves=(after - before)[1:],
        entropy=numpy.array([continued[prefix.name].entropy for prefix in prefixes]),
    )


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """The first tokens of a response, whose continuations are sampled; `problem` is its number among the rollouts'."""

    problem: int
    prompt_id: str
    tokens: tuple[int, ...]

    @property
    def name(self) -> str:
        """The key of sampling seeds and stored continuations, the same for equal prefixes of a problem."""
        tokens = ",".join(map(str, self.tokens))
        return f"{self.prompt_id}/{hashlib.blake2b(tokens.encode(), digest_size=12).hexdigest()}"


def chosen_tokens(rollouts: Rollouts, *, num_responses: int, num_tokens: int, seed: int) -> dict[int, list[int]]:
    """Returns the measured tokens of each measured response, by the response's row; a function of the seed.

    Responses are drawn from groups whose rewards differ, since the others have no signal. If a response is longer than
    `num_tokens`, that many of its tokens are drawn. Raises `DataError` if all groups have equal rewards.
    """
    live = credit.live_rows(rollouts.rewards, rollouts.group_ids).nonzero().flatten().tolist()
    if not live:
        raise DataError(
            f"all {len(rollouts.problems)} groups of {rollouts.group_size} responses have equal rewards, so no token made a "
            "difference; give other data, another checkpoint, or more responses per problem (worker.rollout.n)"
        )
    rows = sorted(numpy.random.default_rng(seed).permutation(live)[:num_responses].tolist())
    chosen: dict[int, list[int]] = {}
    for row in rows:
        length = len(rollouts.generations[row].response_ids)
        chosen[row] = sorted(numpy.random.default_rng([seed, row]).permutation(length)[:num_tokens].tolist())
    return chosen


def prefix_of(rollouts: Rollouts, row: int, length: int) -> Prefix:
    """Returns the first `length` tokens of the response in `row`."""
    problem = row // rollouts.group_size
    tokens = rollouts.generations[row].response_ids[:length]
    return Prefix(problem=problem, prompt_id=rollouts.problems[problem].prompt_id, tokens=tokens)


def needed_prefixes(rollouts: Rollouts, chosen: Mapping[int, Sequence[int]]) -> list[Prefix]:
    """Returns the distinct prefixes before and after the chosen tokens, the shortest first, without whole responses."""
    found: dict[str, Prefix] = {}
    for row, tokens in chosen.items():
        whole = len(rollouts.generations[row].response_ids)
        for length in sorted({length for token in tokens for length in (token, token + 1) if length < whole}):
            prefix = prefix_of(rollouts, row, length)
            found[prefix.name] = prefix
    return sorted(found.values(), key=lambda prefix: (len(prefix.tokens), prefix.problem, prefix.tokens))
