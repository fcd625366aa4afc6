"""Sets a right and a wrong response to one problem side by side, under the run's method and under uniform credit.

The credit of a token is compared with what the plain method gives every token of the same response:
`share_t = A_t / A_uniform`. A share of 1 has half of the full colour, so that more and less can both be seen.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy

from cepo.algorithms.settings import DEFAULT_ESTIMATOR
from cepo.files.trees import Fields
from cepo.report.tokens import ColouredRow, ColouredToken, coloured, visible
from cepo.run_folder.trace import RolloutRecord

_ADVANTAGE = "advantage"
_ZERO = 1e-6
_LEAST_SPAN = 0.1
"""The span of shares is at least this, so that rounding is not drawn as a difference."""
_NOTICEABLE = 0.02
"""A word is named only if a share in it exceeds 1 by this."""
_MOST_WORDS = 3
_LONGEST_WORD = 24


@dataclass(frozen=True, kw_only=True)
class ContrastSide:
    """One response: its verdict, the link to it in the credit view, and its tokens under each method."""

    verdict: str
    reward: float
    link: str
    rows: Sequence[ColouredRow]


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """What the first screen shows of credit; `low` and `high` are the shares at the ends of the colour scale."""

    sentence: str
    step: int
    problem: str
    ground_truth: str
    image: str | None
    sides: Sequence[ContrastSide]
    baseline: str
    low: float
    high: float


def clarity(rollout: RolloutRecord) -> tuple[bool, float]:
    """Returns whether the tokens of a response differ in credit, and how clearly a few of them get more than the others.

    The clarity is the sum of the three largest excesses `share_t - 1`, with the mean advantage for the uniform one, less
    half of all other shifts. Of a response with equal advantages it is the largest evidence.
    """
    advantages = numpy.asarray(rollout.token_advantages, dtype=float)
    mean = advantages.mean()
    if abs(mean) > _ZERO and numpy.ptp(advantages) > _ZERO * abs(mean):
        excesses = numpy.sort(advantages / mean - 1)
        others = excesses[:-3]
        return True, float(excesses[-3:].sum() - numpy.abs(others).sum() / 2)
    evidence = numpy.nan_to_num(rollout.delta or [0.0])
    return False, float(numpy.abs(evidence).max())


def clearest_pair(rollouts: Sequence[RolloutRecord]) -> tuple[tuple[bool, bool, float], list[int]]:
    """Returns the places of the clearest right and wrong response of a group, after a rank, by which groups are compared.

    A group without both has the one clearest response, and ranks below all pairs.
    """
    clarities = [clarity(rollout) for rollout in rollouts]
    places: list[int] = []
    for verdict in (True, False):
        places_of_verdict = [place for place, rollout in enumerate(rollouts) if rollout.right == verdict]
        if places_of_verdict:
            places.append(max(places_of_verdict, key=lambda place: clarities[place]))  # of equals the first
    differs, least_clarity = min(clarities[place] for place in places)
    return (len(places) > 1, differs, least_clarity), places


def contrast_of(step: Fields, places: Sequence[int]) -> Contrast:
    """Builds the first screen's contrast from `credit_view.step_credit`'s data and the places of its one or two responses."""
    method, *_ = step["methods"]
    baseline = step["methods"].index(DEFAULT_ESTIMATOR) if DEFAULT_ESTIMATOR in step["methods"] else None
    rollouts = [step["rollouts"][place] for place in places]
    shares_of_rollouts = [_shares(rollout, baseline) for rollout in rollouts]
    span = _LEAST_SPAN
    for shares in shares_of_rollouts:
        span = max(span, *(abs(share - 1) for share in shares))
    span = min(span, 1.0)
    group = step["groups"][rollouts[0]["group"]]
    sides: list[ContrastSide] = []
    for place, rollout, shares in zip(places, rollouts, shares_of_rollouts, strict=True):
        rows = [ColouredRow(label=method, tokens=list(_coloured(rollout, shares, span)))]
        if method != DEFAULT_ESTIMATOR:
            uniform = [1.0] * len(shares)
            rows.append(ColouredRow(label=DEFAULT_ESTIMATOR, tokens=list(_coloured(rollout, uniform, span))))
        sides.append(
            ContrastSide(
                verdict=_verdict(rollout),
                reward=rollout["reward"],
                link=f"#step={step['step']}&rollout={place}",
                rows=rows,
            )
        )
    return Contrast(
        sentence=_sentence(method, rollouts, shares_of_rollouts),
        step=step["step"],
        problem=visible(group["problem"].replace("<image>", "").strip()),
        ground_truth=visible(group["ground_truth"]),
        image=group["images"][0] if group["images"] else None,
        sides=sides,
        baseline=DEFAULT_ESTIMATOR,
        low=1 - span,
        high=1 + span,
    )


def _verdict(rollout: Fields) -> str:
    return "right" if rollout["accuracy"] >= 0.5 else "wrong"


def _shares(rollout: Fields, baseline: int | None) -> list[float]:
    """Returns `share_t` of each token; without the plain method's advantage, that of the mean."""
    _, own_columns, *_ = rollout["columns"]
    advantages = [advantage or 0.0 for advantage in own_columns[_ADVANTAGE]]
    uniform = statistics.fmean(advantages)
    if baseline is not None:
        uniform = statistics.fmean(rollout["columns"][baseline + 1][_ADVANTAGE])
    if abs(uniform) < _ZERO:
        return [1.0] * len(advantages)
    return [advantage / uniform for advantage in advantages]


def _coloured(rollout: Fields, shares: Sequence[float], span: float) -> Iterator[ColouredToken]:
    """Yields the tokens: credit of a right response is blue, blame of a wrong one orange, and the reverse if it turns."""
    direction = 1 if _verdict(rollout) == "right" else -1
    for text, share in zip(rollout["tokens"], shares, strict=True):
        strength = (share - 1 + span) / (2 * span)
        if share < 0:
            strength = share / 2
        elif strength < 0:
            strength = 0.0
        yield coloured(text, direction * strength, f"{share:.2f} × uniform")


def _sentence(method: str, rollouts: Sequence[Fields], shares_of_rollouts: Sequence[Sequence[float]]) -> str:
    """Returns in one sentence which words the method singles out."""
    if method == DEFAULT_ESTIMATOR:
        return f"{method} gives every token of a response the same credit or blame."
    clauses: list[str] = []
    for rollout, shares in zip(rollouts, shares_of_rollouts, strict=True):
        words = _words_singled_out(rollout["tokens"], shares)
        if words:
            verb = "credits" if _verdict(rollout) == "right" else "blames"
            clauses.append(f"{verb} {_listed(words)} of the {_verdict(rollout)} response most")
    if not clauses:
        return f"Here {method} gives nearly every token what {DEFAULT_ESTIMATOR} gives it."
    return f"{method} {' and '.join(clauses)}; {DEFAULT_ESTIMATOR} treats every token of a response alike."


def _words_singled_out(tokens: Sequence[str], shares: Sequence[float]) -> list[str]:
    """Returns the words with the tokens of the largest shares, at most three, in the order of the response."""
    largest_excess = max(share - 1 for share in shares)
    if largest_excess < _NOTICEABLE:
        return []
    text = "".join(tokens)
    share_of_word: dict[str, float] = {}
    start = 0
    for token, share in zip(tokens, shares, strict=True):
        end = start + len(token)
        if share - 1 >= largest_excess / 2:
            word = _word_at(text, start, end)
            share_of_word[word] = max(share, share_of_word.get(word, 0.0))
        start = end
    share_of_word.pop("", None)
    words = sorted(share_of_word, key=lambda word: -share_of_word[word])[:_MOST_WORDS]
    words.sort(key=list(share_of_word).index)
    return words


def _word_at(text: str, start: int, end: int) -> str:
    """Returns a token with the letters and digits that continue it on either side, such as "45" for the token "4" of "=45."."""
    if text[start:end][:1].isalnum():
        while start > 0 and text[start - 1].isalnum():
            start -= 1
    if text[start:end][-1:].isalnum():
        while end < len(text) and text[end].isalnum():
            end += 1
    word = visible(text[start:end].strip()) if text[start:end].strip() else ""
    return word if len(word) <= _LONGEST_WORD else word[: _LONGEST_WORD - 1] + "…"


def _listed(words: Sequence[str]) -> str:
    *most, last = [f"“{word}”" for word in words]
    return f"{', '.join(most)} and {last}" if most else last
