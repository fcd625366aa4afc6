"""Defines and checks what a reward function receives and must return (EasyR1's contract)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, cast

from cepo.errors import RewardError

RewardScore = dict[str, float]
"""The numbers for one sample. `overall` is required and becomes the reward; the others are averaged for the metrics."""
LARGEST_SCORE = 1e18
"""The largest accepted score: its square is finite in float32, in which advantages are computed."""


@dataclass(frozen=True, kw_only=True)
class RewardFailure:
    """Why a sample has no score."""

    reason: str  # one line
    details: str = field(repr=False)  # the user's own frames and the exception
    breaks_contract: bool = False  # the function returned something that is not a score
    timed_out: bool = False


@dataclass(frozen=True)
class RewardOutcome:
    """The scores of one call, in the order of its inputs; all fields of failed samples are 0."""

    scores: list[RewardScore]
    num_raised: int  # samples whose function raised, broke the contract or crashed its process
    num_timed_out: int
    first_failure: RewardFailure | None = None


class ContractError(RewardError):
    """A function returned something other than scores, which will happen with every sample."""


class BatchContractError(ContractError):
    """A batch function did not return one score for each sample, so scores cannot be assigned to samples."""


def validate_score(score: object, *, sample: int, source: str) -> RewardScore:
    """Returns the score as plain floats.

    Raises `ContractError`, naming `source` (the reward function) and `sample`, if the score is not a dict with string
    keys and finite numbers, or has no `overall`.
    """
    where = f"{source} returned for sample {sample}"
    if not isinstance(score, Mapping):
        raise ContractError(
            f"{where} a {type(score).__name__}: {score!r:.200}. Return a dict such as {{'overall': 1.0}}."
        )
    entries = cast("Mapping[Any, Any]", score)
    if "overall" not in entries:
        raise ContractError(
            f"{where} a dict without 'overall', with {sorted(map(str, entries))}. Add the key 'overall'."
        )
    for name in entries:
        if not isinstance(name, str):
            raise ContractError(f"{where} the key {name!r} ({type(name).__name__}). Keys are strings.")
    # A key of a subclass of str may not unpickle in the trainer.
    return {str.__str__(name): _checked_number(name, value, where) for name, value in entries.items()}


def validate_scores(scores: object, num_expected: int, *, source: str, first_sample: int = 0) -> list[RewardScore]:
    """Checks a batch function's scores by `validate_score`; raises `BatchContractError` if their number is wrong."""
    kind = type(scores).__name__
    is_list = isinstance(scores, Sequence) and not isinstance(scores, str | bytes)
    found = cast("Sequence[Any]", scores) if is_list else ()
    if not is_list or len(found) != num_expected:
        returned = f"{len(found)} scores" if is_list else f"a {kind}"
        raise BatchContractError(
            f"{source} returned {returned} for {num_expected} samples. Return one per sample, in order, as a list of dicts, "
            "0 for one that cannot be judged; set REWARD_TYPE = 'sequential' in its file if it takes one sample at a time."
        )
    return [validate_score(score, sample=first_sample + index, source=source) for index, score in enumerate(found)]


def _checked_number(name: object, value: object, where: str) -> float:
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:  # an integer too large for a float
        number = math.inf
    if not abs(number) <= LARGEST_SCORE:
        try:
            shown = f"{value!r:.200}"
        except Exception as error:  # an integer with too many digits, or a custom repr
            shown = f"<{type(error).__name__} in its repr>"
        raise ContractError(
            f"{where} {name!r} = {shown} ({type(value).__name__}). Return a number from {-LARGEST_SCORE:g} to {LARGEST_SCORE:g}."
        )
    return number
