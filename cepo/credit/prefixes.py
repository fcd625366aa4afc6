"""Chooses the tokens to measure, and lists the prefixes that have to be continued for them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy

from cepo.algorithms import credit
from cepo.errors import DataError
from cepo.trainer.asking import Rollouts


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """The first tokens of a response, whose continuations are sampled.

    Attributes:
        problem: index of the problem among those of the rollouts.
        prompt_id: the problem's name in the data.
        tokens: the tokens before the continuation.
    """

    problem: int
    prompt_id: str
    tokens: tuple[int, ...]

    @property
    def name(self) -> str:
        """The key of sampling seeds and stored continuations, the same for equal prefixes of a problem."""
        tokens = ",".join(map(str, self.tokens))
        return f"{self.prompt_id}/{hashlib.blake2b(tokens.encode(), digest_size=12).hexdigest()}"


def chosen_tokens(rollouts: Rollouts, *, num_responses: int, num_tokens: int, seed: int) -> dict[int, list[int]]:
    """Returns the measured tokens of each measured response, by the response's row.

    Responses are drawn from groups whose rewards differ, since the others have no signal. If a response is longer than
    `num_tokens`, that many of its tokens are drawn. Both choices are functions of the seed.

    Raises:
        DataError: all groups have equal rewards.
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
        drawn = numpy.random.default_rng([seed, row]).permutation(length)[:num_tokens]
        chosen[row] = sorted(drawn.tolist())
    return chosen


def prefix_of(rollouts: Rollouts, row: int, length: int) -> Prefix:
    """Returns the first `length` tokens of the response in `row`."""
    problem = row // rollouts.group_size
    tokens = rollouts.generations[row].response_ids[:length]
    return Prefix(problem=problem, prompt_id=rollouts.problems[problem].prompt_id, tokens=tokens)


def needed_prefixes(rollouts: Rollouts, chosen: Mapping[int, Sequence[int]]) -> list[Prefix]:
    """Returns the distinct prefixes before and after the chosen tokens, the shortest first.

    Whole responses are left out: their value is their own verdict. Responses to a problem that begin alike share their
    prefixes.
    """
    found: dict[str, Prefix] = {}
    for row, tokens in chosen.items():
        whole = len(rollouts.generations[row].response_ids)
        for length in sorted({length for token in tokens for length in (token, token + 1) if length < whole}):
            prefix = prefix_of(rollouts, row, length)
            found[prefix.name] = prefix
    return sorted(found.values(), key=lambda prefix: (len(prefix.tokens), prefix.problem, prefix.tokens))
