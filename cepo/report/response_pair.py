"""Sets a recorded right and a wrong response to one problem side by side, with the credit of each of their tokens.

The credit of a token is compared with uniform credit: `share_t = A_t / A_uniform`. In the colour scale, which is that of the
credit view, a share of 1 is white.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy

from cepo.report.shown_responses import ColouredRow, ColouredToken, coloured, shown_problem, verdict, visible
from cepo.run_folder.trace import GroupRecord, RolloutRecord

_ZERO = 1e-6
_LEAST_SPAN = 0.1
"""The span of shares is at least this, so that rounding is not drawn as a difference."""
_NOTICEABLE = 0.02
"""A word is named only if a share in it exceeds 1 by this."""
_MOST_WORDS = 3
_WORD = re.compile(r"[^\W_]+")
_LONGEST_WORD = 24


@dataclass(frozen=True, kw_only=True)
class ContrastSide:
    """One response: its place in its group, its verdict, and its tokens under each method."""

    place: int
    verdict: str
    reward: float
    rows: Sequence[ColouredRow]


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """The clearest responses of a group; `low` and `high` are the shares at the ends of the colour scale."""

    sentence: str
    step: int
    problem: str
    ground_truth: str
    sides: Sequence[ContrastSide]
    uniform: str
    low: float
    high: float


def clarity(rollout: RolloutRecord) -> tuple[bool, float]:
    """Returns whether the tokens of a response differ in credit, and how clearly a few of them get more than the others.

    The clarity is the sum of the three largest excesses `share_t - 1`, with the mean advantage for the uniform one, less
    half of all other shifts. Of a response with equal advantages it is the largest evidence.
    """
    advantages = numpy.asarray(rollout.token_advantages or [0.0], dtype=float)
    mean = advantages.mean()
    is_uniform = numpy.ptp(advantages) <= _ZERO * abs(mean)
    if abs(mean) <= _ZERO or is_uniform or not numpy.isfinite(mean):
        evidence = numpy.abs(numpy.nan_to_num(rollout.delta or [0.0]))
        return False, float(evidence.max())
    excesses = numpy.sort(advantages / mean - 1)
    largest = excesses[-3:]
    smaller_excesses = excesses[:-3]
    return True, float(largest.sum() - numpy.abs(smaller_excesses).sum() / 2)


def clearest_pair(rollouts: Sequence[RolloutRecord]) -> tuple[tuple[bool, bool, float], list[int]]:
    """Returns the places of the clearest right and wrong response of a group, after a rank, by which groups are compared.

    A group without both has the one clearest response, and ranks below all pairs.
    """
    clarities = [clarity(rollout) for rollout in rollouts]
    places: list[int] = []
    for is_right in (True, False):
        of_verdict = [place for place, rollout in enumerate(rollouts) if rollout.right == is_right]
        if of_verdict:
            places.append(max(of_verdict, key=lambda place: clarities[place]))
    differs, least_clarity = min(clarities[place] for place in places)
    return (len(places) > 1, differs, least_clarity), places


def contrast_of(
    group: GroupRecord,
    places: Sequence[int],
    *,
    method: str,
    baseline: str | None = None,
    uniform_advantages: Sequence[float] | None = None,
    beliefs: Mapping[int, Sequence[float]] | None = None,
) -> Contrast:
    """Builds the contrast of one or two responses of a group, by their places, as `method` credits their tokens.

    `beliefs` are P(right) before each token, by place: see `cepo.algorithms.statistics.evidence_values`.

    `uniform_advantages` are what `baseline`, the method of uniform credit, gives each token of these responses; by
    default each response's own mean.
    """
    rollouts = [group.rollouts[place] for place in places]
    if uniform_advantages is None:
        uniform_advantages = [float(numpy.mean(rollout.token_advantages or [0.0])) for rollout in rollouts]
    shares_of_rollouts = [_shares(*pair) for pair in zip(rollouts, uniform_advantages, strict=True)]
    largest_shift = max(abs(share - 1) for share in itertools.chain([1.0], *shares_of_rollouts))
    span = min(max(_LEAST_SPAN, largest_shift), 1.0)
    sides: list[ContrastSide] = []
    for place, rollout, shares in zip(places, rollouts, shares_of_rollouts, strict=True):
        belief = (beliefs or {}).get(place, ())
        rows = [ColouredRow(label=method, tokens=list(_coloured(rollout, shares, span, belief)), belief=belief)]
        if baseline not in (None, method):
            uniform_shares = [1.0] * len(shares)
            rows.append(ColouredRow(label=baseline, tokens=list(_coloured(rollout, uniform_shares, span))))
        sides.append(ContrastSide(place=place, verdict=verdict(rollout.right), reward=rollout.reward, rows=rows))
    return Contrast(
        sentence=_sentence(method, baseline, rollouts, shares_of_rollouts),
        step=group.step,
        problem=shown_problem(group.problem),
        ground_truth=visible(group.ground_truth),
        sides=sides,
        uniform="the mean of the response" if baseline is None else f"what {baseline} gives",
        low=1 - span,
        high=1 + span,
    )


def _shares(rollout: RolloutRecord, uniform_advantage: float) -> list[float]:
    """Returns `share_t` of each token; 1 for all if uniform credit is 0."""
    if abs(uniform_advantage) < _ZERO:
        return [1.0] * len(rollout.tokens)
    shares = numpy.nan_to_num(numpy.asarray(rollout.token_advantages, dtype=float) / uniform_advantage)
    return shares.tolist()


def _coloured(
    rollout: RolloutRecord, shares: Sequence[float], span: float, belief: Sequence[float] = ()
) -> Iterator[ColouredToken]:
    """Yields the tokens: more credit or less blame than uniform is blue, less credit or more blame orange."""
    direction = 1 if rollout.right else -1
    for place, (text, share) in enumerate(zip(rollout.tokens, shares, strict=True)):
        strength = (share - 1) / span
        believed = f", P(right) {belief[place]:.2f}" if belief else ""
        yield coloured(text, direction * strength, f"{share:.2f} × uniform{believed}")


def _sentence(
    method: str,
    baseline: str | None,
    rollouts: Sequence[RolloutRecord],
    shares_of_rollouts: Sequence[Sequence[float]],
) -> str:
    """Returns in one sentence which words the method singles out."""
    if method == baseline:
        return f"{method} gives every token of a response the same credit or blame."
    clauses: list[str] = []
    for rollout, shares in zip(rollouts, shares_of_rollouts, strict=True):
        words = _words_singled_out(rollout.tokens, shares)
        if words:
            verb = "credits" if rollout.right else "blames"
            clauses.append(f"{verb} {_listed(words)} of the {verdict(rollout.right)} response most")
    if not clauses:
        return f"Here {method} gives nearly every token of a response the same."
    sentence = f"{method} {' and '.join(clauses)}"
    if baseline is not None:
        sentence += f"; {baseline} treats every token of a response alike"
    return f"{sentence}."


def _words_singled_out(tokens: Sequence[str], shares: Sequence[float]) -> list[str]:
    """Returns the words that the largest shares stand in, at most three, in the order of the response."""
    largest_excess = max((share - 1 for share in shares), default=0.0)
    if largest_excess < _NOTICEABLE:
        return []
    share_of_word = _shares_of_words(tokens, shares)
    singled_out = [word for word, share in share_of_word.items() if share - 1 >= largest_excess / 2]
    named = sorted(singled_out, key=lambda word: -share_of_word[word])[:_MOST_WORDS]
    return [word for word in singled_out if word in named]


def _shares_of_words(tokens: Sequence[str], shares: Sequence[float]) -> dict[str, float]:
    """Returns for each word of a response the largest share of a token in it, or of one that it is a part of."""
    share_of_character = numpy.repeat(shares, [len(token) for token in tokens])
    share_of_word: dict[str, float] = {}
    for match in _WORD.finditer("".join(tokens)):
        share = float(share_of_character[match.start() : match.end()].max())
        word = match[0]
        if len(word) > _LONGEST_WORD:
            word = f"{word[: _LONGEST_WORD - 1]}…"
        share_of_word[word] = max(share, share_of_word.get(word, 0.0))
    return share_of_word


def _listed(words: Sequence[str]) -> str:
    *most, last = [f"“{word}”" for word in words]
    return f"{', '.join(most)} and {last}" if most else last
