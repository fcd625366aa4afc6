"""What a reward function receives and must return (EasyR1's contract), and the check of what it returned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypedDict

from cepo.errors import RewardError


class RewardInput(TypedDict):
    """One sample. Further keys (`prompt`, the row's other columns) reach the function as they are."""

    response: str
    """The decoded valid tokens of the response, without special tokens."""
    response_length: int
    """Tokens of the response, the end token counted."""
    ground_truth: str


RewardScore = dict[str, float]
"""`overall` is required: it becomes the reward. Every other number is averaged into the metrics."""


LARGEST_SCORE = 1e18
"""Squares of it, in float32 as advantages are computed, are finite."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a sample has no score.

    Attributes:
        reason: one line.
        details: the user's own frames and the exception.
        breaks_contract: the function returned, but no score.
    """

    reason: str
    details: str = field(repr=False)
    breaks_contract: bool = False


@dataclass(frozen=True)
class RewardOutcome:
    """The scores of one call, in the order of its inputs, and how many samples failed."""

    scores: list[RewardScore]
    num_raised: int
    """Samples whose function raised, broke the contract, or took its process down: all their fields are 0."""
    num_timed_out: int
    """Samples that ran past the time limit: all their fields are 0."""
    first_failure: Failure | None = None
    """That of the first sample that failed."""


class ContractError(RewardError):
    """A function returned something else than scores: the same will happen with every sample."""


class BatchContractError(ContractError):
    """A batch function did not return one score for each sample, so that none can be told whose it is."""


def validate_score(score: object, *, sample: int, source: str) -> RewardScore:
    """The score as plain floats.

    Raises `ContractError` naming `source` (the reward function) and `sample` where the score is not a dict with string
    keys and finite numbers, or has no `overall`.
    """
    where = f"{source} returned for sample {sample}"
    if not isinstance(score, Mapping):
        raise ContractError(
            f"{where} a {type(score).__name__}: {score!r:.200}. Return a dict such as {{'overall': 1.0}}."
        )
    if "overall" not in score:
        raise ContractError(f"{where} a dict without 'overall', with {sorted(map(str, score))}. Add the key 'overall'.")
    return {_checked_name(name, where): _checked_number(name, value, where) for name, value in score.items()}


def validate_scores(scores: object, num_expected: int, *, source: str, first_sample: int = 0) -> list[RewardScore]:
    """The scores of a batch function, each checked by `validate_score`; `BatchContractError` where their number is wrong."""
    if not isinstance(scores, Sequence) or isinstance(scores, str | bytes):
        raise BatchContractError(
            f"{source} returned a {type(scores).__name__} for {num_expected} samples. A batch function returns a list "
            "of dicts, one per sample; set REWARD_TYPE = 'sequential' in its file if it takes one sample at a time."
        )
    if len(scores) != num_expected:
        raise BatchContractError(
            f"{source} returned {len(scores)} scores for {num_expected} samples. Return one per sample, in their order, 0 "
            "for one that cannot be judged; set REWARD_TYPE = 'sequential' in its file if it takes one sample at a time."
        )
    return [validate_score(score, sample=first_sample + index, source=source) for index, score in enumerate(scores)]


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.200}"
    except Exception as error:  # an integer of too many digits, or an object's own repr
        return f"<{type(error).__name__} in its repr>"


def _checked_name(name: Any, where: str) -> str:
    if not isinstance(name, str):
        raise ContractError(f"{where} the key {name!r} ({type(name).__name__}). Keys are strings.")
    return str.__str__(name)  # a subclass would not travel to the trainer


def _checked_number(name: Any, value: Any, where: str) -> float:
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:  # an integer beyond every float
        number = math.inf
    if not abs(number) <= LARGEST_SCORE:
        raise ContractError(
            f"{where} {name!r} = {_shown(value)} ({type(value).__name__}). Return a number from {-LARGEST_SCORE:g} to "
            f"{LARGEST_SCORE:g}."
        )
    return number
