"""Measures how well credits and values agree with the truth, and what teachers know of responses before they are written.

All errors are from a bootstrap over problems, because the tokens of a problem's responses depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

import numpy
from numpy.typing import NDArray
from torch import Tensor

from cepo.credit.signals import MethodSignal
from cepo.credit.truth import Numbers, Truth
from cepo.trainer.asking import Rollouts
from cepo.trees import Tree

DECISIVE = 0.25
"""A token with |A*| above this is decisive: it moves the probability of a correct answer by more than a quarter."""
DRAWS = 500
BINS = 10
QUARTERS = ("first", "second", "third", "last")
_Indices = NDArray[numpy.int64]


class Figure(TypedDict):
    """A statistic with its standard error and 95 % interval over problems; undefined numbers are None."""

    value: float | None
    error: float | None
    low: float | None
    high: float | None


def pearson(one: Numbers, other: Numbers) -> float:
    """Returns the linear correlation; NaN if either side is constant."""
    one, other = one - one.mean(), other - other.mean()
    scale = numpy.sqrt((one @ one) * (other @ other))
    return float(one @ other / scale) if scale > 1e-300 else numpy.nan


def ranks(numbers: Numbers) -> Numbers:
    """Returns ranks from 1; ties get the mean of their ranks."""
    _, index, counts = numpy.unique(numbers, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return (last - (counts - 1) / 2)[index]


def noise_corrected(numbers: Numbers, truth: Numbers, halves: Numbers) -> float:
    """Returns the correlation with the noiseless truth: `cov(x, truth) / (sd(x) sqrt(cov(half 1, half 2)))`.

    The noise of the two halves is independent, so their covariance is the variance of the noiseless truth. NaN if this
    covariance is not positive, or if the numbers are constant.
    """
    between = numpy.cov(halves[0], halves[1])[0, 1]
    deviation = numbers.std(ddof=1)
    if between <= 0 or deviation <= 1e-150:
        return numpy.nan
    return float(numpy.cov(numbers, truth)[0, 1] / (deviation * numpy.sqrt(between)))


def rank_noise_corrected(numbers: Numbers, truth: Numbers, halves: Numbers) -> float:
    """Returns Spearman's correlation divided by the square root of the truth's reliability.

    The reliability is `2 r / (1 + r)`, with r the rank correlation of the two halves. This Spearman-Brown formula is
    exact for linear correlations and an approximation for ranks. NaN if r is not positive.
    """
    between = pearson(ranks(halves[0]), ranks(halves[1]))
    if not between > 0:
        return numpy.nan
    return pearson(ranks(numbers), ranks(truth)) / numpy.sqrt(2 * between / (1 + between))


def area_under_curve(numbers: Numbers, positive: NDArray[numpy.bool_]) -> float:
    """Returns the AUROC of the numbers for positive entries, ties counting half; NaN if all or none are positive."""
    num_positive, num_other = int(positive.sum()), int((~positive).sum())
    if not num_positive or not num_other:
        return numpy.nan
    above = ranks(numbers)[positive].sum() - num_positive * (num_positive + 1) / 2
    return float(above / (num_positive * num_other))


def credit_figures(truth: Truth, numbers: Numbers, *, seed: int) -> dict[str, Figure]:
    """Compares a credit with A*.

    - `auroc` measures how |credit| ranks the decisive tokens within a response, and `top_hit` whether the largest
      |credit| is at the largest |A*|. Both are means over responses with a decisive token.
    - `share_on_decisive` is the part of the sum of |credit| that is on decisive tokens.
    - `sign_agreement` is the share of decisive tokens whose credit has the sign of A*.
    """
    decisive, size = numpy.abs(truth.credit) > DECISIVE, numpy.abs(numbers)
    # Each response's figures stand at its first measured token, so that they are drawn with its tokens.
    areas, hits = numpy.full((2, len(numbers)), numpy.nan)
    for own in truth.entries.values():
        areas[own[0]] = area_under_curve(size[own], decisive[own])
        if decisive[own].any():
            largest = size[own] == size[own].max()  # ties count their share
            hits[own[0]] = largest[abs(truth.credit[own]).argmax()] / largest.sum()

    def mean(figures: Numbers) -> float:
        kept = figures[~numpy.isnan(figures)]
        return float(kept.mean()) if len(kept) else numpy.nan

    def metrics(tokens: _Indices) -> dict[str, float]:
        x, true, halves = numbers[tokens], truth.credit[tokens], truth.credit_halves[:, tokens]
        deciding, total = decisive[tokens], size[tokens].sum()
        agree = numpy.sign(x) == numpy.sign(true)
        return {
            "pearson": pearson(x, true),
            "pearson_corrected": noise_corrected(x, true, halves),
            "spearman": pearson(ranks(x), ranks(true)),
            "spearman_corrected": rank_noise_corrected(x, true, halves),
            "auroc": mean(areas[tokens]),
            "top_hit": mean(hits[tokens]),
            "share_on_decisive": float(size[tokens][deciding].sum() / total) if total > 0 else numpy.nan,
            "sign_agreement": float(agree[deciding].mean()) if deciding.any() else numpy.nan,
        }

    return bootstrap(truth.problem, metrics, seed=[seed, 3])


def value_figures(truth: Truth, numbers: Numbers, *, seed: int) -> dict[str, Figure]:
    """Compares a value with V: correlations, and the mean gap of its calibration curve."""

    def metrics(tokens: _Indices) -> dict[str, float]:
        x, true = numbers[tokens], truth.value[tokens]
        gaps = sum(point["num_tokens"] * abs(point["believed"] - point["true"]) for point in calibration(x, true))
        return {
            "pearson": pearson(x, true),
            "pearson_corrected": noise_corrected(x, true, truth.value_halves[:, tokens]),
            "calibration_error": gaps / len(x),
        }

    return bootstrap(truth.problem, metrics, seed=[seed, 3])


def calibration(believed: Numbers, true: Numbers) -> list[dict[str, float]]:
    """Returns the calibration curve: mean belief and mean truth of the tokens in each non-empty tenth of [0, 1]."""
    index = (believed * BINS).astype(int).clip(0, BINS - 1)
    return [
        {
            "believed": float(believed[index == tenth].mean()),
            "true": float(true[index == tenth].mean()),
            "num_tokens": int((index == tenth).sum()),
        }
        for tenth in numpy.unique(index)
    ]


def bootstrap(
    problems: _Indices, metrics: Callable[[_Indices], Mapping[str, float]], *, seed: Sequence[int]
) -> dict[str, Figure]:
    """Returns the figures of `metrics`, a function of entries, from `DRAWS` draws of as many problems with replacement.

    `problems` has the problem of each entry. Equal seeds give equal draws. Figures of a single problem have no error.
    """
    entries = {problem: numpy.flatnonzero(problems == problem) for problem in numpy.unique(problems).tolist()}
    generator = numpy.random.default_rng(seed)
    found = [metrics(numpy.arange(len(problems)))]
    for _ in range(DRAWS if len(entries) > 1 else 0):
        drawn = generator.choice(list(entries), len(entries)).tolist()
        found.append(metrics(numpy.concatenate([entries[problem] for problem in drawn])))
    return {name: figure_of(numpy.array([each[name] for each in found])) for name in found[0]}


def figure_of(values: Numbers) -> Figure:
    """Builds a figure from its value, the first entry, and its bootstrap draws; non-finite draws are ignored."""
    kept = values[1:][numpy.isfinite(values[1:])]
    value = float(values[0]) if numpy.isfinite(values[0]) else None
    if value is None or len(kept) < 2:
        return Figure(value=value, error=None, low=None, high=None)
    low, high = numpy.quantile(kept, [0.025, 0.975])
    return Figure(value=value, error=float(kept.std(ddof=1)), low=float(low), high=float(high))


def knowledge(signals: Sequence[MethodSignal], rollouts: Rollouts, *, seed: int) -> list[Tree]:
    """Returns the figures of `known` for the teacher of each method and view; equal ones once.

    Counted are the responses with a reference, unless it is a part of themselves other than an answer.
    """
    found: list[Tree] = []
    truths = [problem.ground_truth for problem in rollouts.problems for _ in range(rollouts.group_size)]
    for each in signals:
        for view in each.batch.plan.views:
            rows: list[int] = []
            for row in view.rows:
                shown, answers = view.references[row], (truths[row], each.batch.plan.answers[row])
                if shown is None or shown in answers or shown.strip() not in rollouts.responses[row]:
                    rows.append(row)
            gain = each.batch.teacher_log_probs[view.name] - each.batch.old_log_probs
            own = known(gain, rollouts, rows, seed=seed) if any(rollouts.correct[row] for row in rows) else {}
            if own and own not in [{key: row[key] for key in own} for row in found]:
                found.append({"name": f"{each.label}: {view.name}", **own})
    return found


def known(gain: Tensor, rollouts: Rollouts, rows: Sequence[int], *, seed: int) -> Tree:
    """Returns what a teacher knows of right responses, in nats per response.

    `nats = mean over y of sum_t gain_t`, with `gain_t = log P_teacher(y_t | x, reference, y_<t) - log P(y_t | x, y_<t)`,
    and the same for each quarter of the response. By Gibbs' inequality no teacher exceeds -log p on average, p being
    the problem's pass rate; only P(y | right) reaches it, and it does so for every right response. `limit` is the mean
    of -log p with the group's share of right responses. `wrong` is the mean of sum_t gain_t over wrong responses; it has
    no lower limit, since a teacher may know that a response cannot be right. Errors are from a bootstrap over problems.

    `gain` is (B, T), 0 on padding; `rows` are those of the responses that count, of which one is right.
    """
    right, wrong = ([row for row in rows if bool(rollouts.correct[row]) is which] for which in (True, False))
    table = []
    for row in right:
        length = int(rollouts.response_mask[row].sum())
        parts = [float(part.sum()) for part in numpy.array_split(gain[row, :length].double().numpy(), len(QUARTERS))]
        rate = float(rollouts.correct[list(rollouts.rows_of(row // rollouts.group_size))].double().mean())
        table.append([sum(parts), *parts, -math.log(rate)])
    sums = gain[wrong].double().sum(1, keepdim=True).tolist() or [[math.nan]]  # an undefined figure where none is wrong

    def means(names: Sequence[str], table: Sequence[Sequence[float]], rows: Sequence[int]) -> dict[str, Figure]:
        columns, problems = numpy.array(table), numpy.array(rows) // rollouts.group_size
        return bootstrap(
            problems, lambda some: dict(zip(names, columns[some].mean(axis=0), strict=True)), seed=[seed, 5]
        )

    figures = means(("nats", *QUARTERS, "limit"), table, right) | means(("wrong",), sums, wrong or [0])
    return {"responses": len(right), **figures}
