"""Computes the credits of several methods for the same rollouts, and how well credits and values agree with the truth.

It also measures what teachers know of responses before they are written. All errors are from a bootstrap over problems,
because the tokens of a problem's responses depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from cepo.algorithms import Estimator, credit
from cepo.credit.session import Session
from cepo.credit.truth import Numbers, Truth
from cepo.data.batch import ScoringRow
from cepo.data.contexts import ContextBuilder
from cepo.files.trees import Tree
from cepo.trainer.batches import ScoredBatch, scored_batch
from cepo.trainer.groups import rollout_groups
from cepo.trainer.planning import ScoringPlan, make_plan
from cepo.trainer.rollouts import Rollouts
from cepo.types import TokenSignal

FIRST_STEP = 0
"""The step at which the methods' schedules are evaluated, so lambda is at its start."""
DECISIVE = 0.25
"""A token with |A*| above this is decisive: it moves the probability of a correct answer by more than a quarter."""
DRAWS = 500
BINS = 10
QUARTERS = ("first", "second", "third", "last")
_Indices = NDArray[numpy.int64]


@dataclass(frozen=True, kw_only=True)
class MethodSignal:
    """A method's scored batch, and the signal computed from it."""

    label: str
    batch: ScoredBatch
    signal: TokenSignal


def signals_of(rollouts: Rollouts, methods: Mapping[str, Estimator], session: Session) -> list[MethodSignal]:
    """Returns the signal of each method; rows that several methods read are scored once."""
    config = session.config
    groups = rollout_groups(
        rollouts,
        session.rewards,
        session.processing,
        seed=config.trainer.seed,
        with_values=any(method.negative.counts_by_value for method in methods.values()),
    )
    # No row is on-policy, so that the student's log-probs are always the trainer's own.
    off_policy = torch.zeros(len(rollouts.generations), dtype=torch.bool)
    plans: list[ScoringPlan] = []
    for method in methods.values():
        contexts = ContextBuilder(session.processing, method.teacher, max_context_length=config.data.max_prompt_length)
        asked = groups if method.needs_teacher(step=FIRST_STEP) else []
        plans.append(make_plan(rollouts, asked, method, contexts, on_policy=off_policy, every_row=False))
    # A row's log-probs depend on the tokens of its context and on its response.
    rows = {(row.context.token_ids, row.row): row for plan in plans for row in _rows(plan)}
    log_probs = dict(zip(rows, session.backend.score(list(rows.values())), strict=True)) if rows else {}
    signals: list[MethodSignal] = []
    for (label, method), plan in zip(methods.items(), plans, strict=True):
        scored = {row.name: log_probs[row.context.token_ids, row.row] for row in _rows(plan)}
        batch = scored_batch(plan, scored)
        signals.append(MethodSignal(label=label, batch=batch, signal=method.signal(batch, step=FIRST_STEP)))
    return signals


def _rows(plan: ScoringPlan) -> list[ScoringRow]:
    return [*plan.student.values(), *(row for view in plan.views for row in view.rows.values())]


class Arm(NamedTuple):
    """A credit or a value of the N measured tokens; `kind` is method, evidence or baseline."""

    name: str
    kind: str
    numbers: Numbers


def credit_arms(truth: Truth, rollouts: Rollouts, signals: Sequence[MethodSignal], *, seed: int) -> list[Arm]:
    """Returns the methods with their controls, the baselines, and the evidence about each token.

    - Baselines multiply the first method's advantage A, which is uniform: `position` by (t + 1) / T, `surprisal` by
      -log P of the token, `entropy` by the entropy of its distribution, `random` by a number from [0, 2).
    - A method whose credit differs within a response has two controls: `permuted`, with its credit permuted among the
      response's measured tokens, and `inverted`, with its credit mirrored at its mean over them.
    - Evidence is delta itself, and the difference of the belief before and after the token.
    """
    uniform = _at(truth, signals[0].signal.advantages)
    lengths = rollouts.response_mask.sum(dim=1).numpy()[truth.row]
    noise = numpy.random.default_rng([seed, 1]).uniform(0.0, 2.0, len(truth.row))
    baselines = [
        Arm("position", "baseline", uniform * (truth.token + 1) / lengths),
        Arm("surprisal", "baseline", uniform * -_at(truth, rollouts.sampled_log_probs)),
        Arm("entropy", "baseline", uniform * truth.entropy),
        Arm("random", "baseline", uniform * noise),
    ]
    arms: list[Arm] = []
    for each in signals:
        own = _at(truth, each.signal.advantages)
        arms.append(Arm(each.label, "method", own))
        mean, permuted = own.copy(), own.copy()
        for row, tokens in truth.entries.items():
            mean[tokens] = own[tokens].mean()
            permuted[tokens] = own[numpy.random.default_rng([seed, 2, row]).permutation(tokens)]
        if not numpy.allclose(own, mean):
            arms.append(Arm(f"{each.label}, inverted", "baseline", 2 * mean - own))
            arms.append(Arm(f"{each.label}, permuted", "baseline", permuted))
    evidence: list[Arm] = []
    for each in signals:
        if (belief := _belief(each, rollouts)) is not None:
            moved = numpy.diff(belief, axis=1)[truth.row, truth.token]
            evidence.append(Arm(f"{each.label}: difference of belief", "evidence", moved))
        if (delta := each.signal.diagnostics.get("delta")) is not None:
            evidence.append(Arm(f"{each.label}: delta", "evidence", _at(truth, delta)))
    return [arms[0], *baselines, *arms[1:], *_different(evidence)]


def value_arms(truth: Truth, rollouts: Rollouts, signals: Sequence[MethodSignal]) -> list[Arm]:
    """Returns the beliefs about prefixes: the smoothed pass rate of the other rollouts, and each method's belief."""
    beliefs = [(each.label, _belief(each, rollouts)) for each in signals]
    evidence = [Arm(label, "evidence", of[truth.row, truth.token]) for label, of in beliefs if of is not None]
    return [Arm("pass rate of the others", "baseline", _prior(rollouts).numpy()[truth.row]), *_different(evidence)]


def _different(arms: Sequence[Arm]) -> list[Arm]:
    """Drops arms that have the numbers of an earlier arm, since methods may read the same evidence."""
    kept: list[Arm] = []
    for arm in arms:
        if not any(numpy.array_equal(arm.numbers, other.numbers) for other in kept):
            kept.append(arm)
    return kept


def _belief(each: MethodSignal, rollouts: Rollouts) -> Numbers | None:
    """(B, T + 1), the believed probability of a correct answer before and after each token; None without evidence.

    It is the `value` that a method records, with the last one repeated, or `b_t = sigmoid(logit p + sum_{s<t} delta_s)`
    for a recorded `delta`, with p the smoothed pass rate of the other rollouts.
    """
    diagnostics = each.signal.diagnostics
    if "value" in diagnostics:
        values = diagnostics["value"].double().numpy()
        last = rollouts.response_mask.sum(dim=1).numpy() - 1
        whole = numpy.pad(values, ((0, 0), (0, 1)))
        whole[numpy.arange(len(last)), last + 1] = values[numpy.arange(len(last)), last]
        return whole
    if "delta" not in diagnostics:
        return None
    delta = torch.nn.functional.pad(diagnostics["delta"], (0, 1))
    return credit.evidence_values(_prior(rollouts), delta).numpy()


def _prior(rollouts: Rollouts) -> Tensor:
    return credit.pass_rate_of_others(rollouts.correct.double(), rollouts.group_ids)[0]


def _at(truth: Truth, tensor: Tensor) -> Numbers:
    """The entries of a (B, T) tensor at the measured tokens."""
    return tensor.double().numpy()[truth.row, truth.token]


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
