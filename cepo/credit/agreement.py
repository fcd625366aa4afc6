"""Computes the credits of several methods for the same rollouts, and how well credits and values agree with the truth.

It also measures what teachers know of responses before they are written. All errors are from a bootstrap over problems,
because the tokens of a problem's responses depend on each other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from cepo.algorithms import Estimator, statistics
from cepo.credit.resources import Scoring
from cepo.credit.truth import Numbers, Truth
from cepo.data.batch import ScoringRow
from cepo.data.prompts import ContextBuilder
from cepo.files.trees import Tree
from cepo.trainer.batches import ScoredBatch, scored_batch
from cepo.trainer.planning import ScoringPlan, View, make_plan
from cepo.trainer.rollout_groups import rollout_groups
from cepo.trainer.rollouts import Rollouts
from cepo.types import TokenSignal

FIRST_STEP = 0
"""The step at which the methods' schedules are evaluated, so lambda is at its start."""
DECISIVE = 0.25
"""A token with |A*| above this is decisive: it moves the probability of a correct answer by more than a quarter."""
DRAWS = 500
QUARTERS = ("first", "second", "third", "last")
_Indices = NDArray[numpy.int64]


@dataclass(frozen=True, kw_only=True)
class MethodSignal:
    """A method's scored batch, and the signal computed from it."""

    label: str
    batch: ScoredBatch
    signal: TokenSignal


def signals_of(rollouts: Rollouts, methods: Mapping[str, Estimator], session: Scoring) -> list[MethodSignal]:
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
    plans: dict[str, ScoringPlan] = {}
    for label, method in methods.items():
        contexts = ContextBuilder(session.processing, method.teacher, max_context_length=config.data.max_prompt_length)
        teachers_groups = groups if method.needs_teacher(step=FIRST_STEP) else []
        plans[label] = make_plan(rollouts, teachers_groups, method, contexts, on_policy=off_policy, every_row=False)
    by_policy: dict[_RowContent, ScoringRow] = {}
    by_teacher: dict[_RowContent, ScoringRow] = {}  # with weights of its own
    for label, method in methods.items():
        for row in plans[label].student.values():
            by_policy[_content_of(row)] = row
        for row in _view_rows(plans[label]):
            rows = by_policy if method.teacher.is_actor else by_teacher
            rows[_content_of(row)] = row
    policy_scores = _scores(by_policy, session.backend.score)
    teacher_scores = _scores(by_teacher, session.backend.score_teacher)
    signals: list[MethodSignal] = []
    for label, method in methods.items():
        scored = {row.name: policy_scores[_content_of(row)] for row in plans[label].student.values()}
        scores = policy_scores if method.teacher.is_actor else teacher_scores
        scored |= {row.name: scores[_content_of(row)] for row in _view_rows(plans[label])}
        batch = scored_batch(plans[label], scored)
        signals.append(MethodSignal(label=label, batch=batch, signal=method.checked_signal(batch, step=FIRST_STEP)))
    return signals


_RowContent = tuple[tuple[int, ...], str | None, int | None]
"""What a row's log-probs depend on: the tokens of its context, the content of its images, and its response."""


def _content_of(row: ScoringRow) -> _RowContent:
    images = row.context.images
    return row.context.token_ids, None if images is None else images.content_key, row.row


def _view_rows(plan: ScoringPlan) -> list[ScoringRow]:
    return [row for view in plan.views for row in view.rows.values()]


def _scores(
    rows: Mapping[_RowContent, ScoringRow], score: Callable[[Sequence[ScoringRow]], list[Tensor]]
) -> dict[_RowContent, Tensor]:
    return dict(zip(rows, score(list(rows.values())), strict=True)) if rows else {}


class Arm(NamedTuple):
    """A credit or a value of the N measured tokens; `kind` is method, evidence, baseline or control."""

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
    uniform = at_measured_tokens(truth, signals[0].signal.advantages)
    lengths = rollouts.response_mask.sum(dim=1).numpy()[truth.row]
    surprisal = -at_measured_tokens(truth, rollouts.sampled_log_probs)
    noise = numpy.random.default_rng([seed, 1]).uniform(0.0, 2.0, len(truth.row))
    baselines = [
        Arm("position", "baseline", uniform * (truth.token + 1) / lengths),
        Arm("surprisal", "baseline", uniform * surprisal),
        Arm("entropy", "baseline", uniform * truth.entropy),
        Arm("random", "baseline", uniform * noise),
    ]
    arms: list[Arm] = []
    for method in signals:
        credits = at_measured_tokens(truth, method.signal.advantages)
        arms.append(Arm(method.label, "method", credits))
        arms += _controls(truth, method.label, credits, seed=seed)
    evidence: list[tuple[str, Numbers | None]] = []
    for method in signals:
        beliefs = _beliefs(truth, method, rollouts)
        moves = None if beliefs is None else beliefs[1] - beliefs[0]
        evidence.append((f"{method.label}: difference of belief", moves))
        evidence.append((f"{method.label}: delta", _delta(truth, method)))
    # The first method, whose advantage is uniform, is followed by the baselines that multiply it.
    return [arms[0], *baselines, *arms[1:], *_evidence_arms(evidence)]


def _controls(truth: Truth, label: str, credits: Numbers, *, seed: int) -> list[Arm]:
    """Returns a credit mirrored at its mean, and permuted, within each response; nothing if it is uniform there."""
    mean = credits.copy()
    permuted = credits.copy()
    for row, tokens in truth.entries.items():
        mean[tokens] = credits[tokens].mean()
        generator = numpy.random.default_rng([seed, 2, row])
        permuted[tokens] = credits[generator.permutation(tokens)]
    if numpy.allclose(credits, mean):
        return []
    return [
        Arm(f"{label}, inverted", "control", 2 * mean - credits),
        Arm(f"{label}, permuted", "control", permuted),
    ]


def delta_arms(truth: Truth, signals: Sequence[MethodSignal]) -> list[Arm]:
    """Returns the evidence delta of each method that has it."""
    return _evidence_arms((method.label, _delta(truth, method)) for method in signals)


def value_arms(truth: Truth, rollouts: Rollouts, signals: Sequence[MethodSignal]) -> list[Arm]:
    """Returns the beliefs about prefixes: the smoothed pass rate of the other rollouts, and each method's belief."""
    evidence: list[tuple[str, Numbers | None]] = []
    for method in signals:
        belief_before, _ = _beliefs(truth, method, rollouts) or (None, None)
        evidence.append((method.label, belief_before))
    pass_rate = Arm("pass rate of the others", "baseline", _prior(rollouts).numpy()[truth.row])
    return [pass_rate, *_evidence_arms(evidence)]


def _evidence_arms(evidence: Iterable[tuple[str, Numbers | None]]) -> list[Arm]:
    """Returns the evidence that there is by its names; of methods that read the same evidence the first."""
    arms: list[Arm] = []
    for name, numbers in evidence:
        if numbers is not None and not any(numpy.array_equal(numbers, earlier.numbers) for earlier in arms):
            arms.append(Arm(name, "evidence", numbers))
    return arms


def _delta(truth: Truth, method: MethodSignal) -> Numbers | None:
    delta = method.signal.diagnostics.get("delta")
    return None if delta is None else at_measured_tokens(truth, delta)


def _beliefs(truth: Truth, method: MethodSignal, rollouts: Rollouts) -> tuple[Numbers, Numbers] | None:
    """Returns the believed probability of a correct answer before and after each measured token; None without evidence.

    It is the `value` that a method records, with the last one repeated, or `b_t = sigmoid(logit p + sum_{s<t} delta_s)`
    for a recorded `delta`, with p the smoothed pass rate of the other rollouts.
    """
    diagnostics = method.signal.diagnostics
    after_token = truth.token + 1
    if "value" in diagnostics:
        belief = diagnostics["value"].double().numpy()  # (B, T)
        last_token = rollouts.response_mask.sum(dim=1).numpy() - 1
        after_token = numpy.minimum(after_token, last_token[truth.row])
    elif "delta" in diagnostics:
        delta = torch.nn.functional.pad(diagnostics["delta"], (0, 1))
        belief = statistics.evidence_values(_prior(rollouts), delta).numpy()  # (B, T + 1)
    else:
        return None
    return belief[truth.row, truth.token], belief[truth.row, after_token]


def _prior(rollouts: Rollouts) -> Tensor:
    prior, _ = statistics.pass_rate_of_others(rollouts.correct.double(), rollouts.group_ids)
    return prior


def at_measured_tokens(truth: Truth, tensor: Tensor) -> Numbers:
    """The entries of a (B, T) tensor at the measured tokens."""
    return tensor.double().numpy()[truth.row, truth.token]


class Figure(TypedDict):
    """A statistic with its standard error and 95 % interval over problems; undefined numbers are None."""

    value: float | None
    error: float | None
    low: float | None
    high: float | None


def pearson(numbers: Numbers, truth: Numbers) -> float:
    """Returns the linear correlation; NaN if either side is constant."""
    numbers = numbers - numbers.mean()
    truth = truth - truth.mean()
    scale = numpy.sqrt((numbers @ numbers) * (truth @ truth))
    return float(numbers @ truth / scale) if scale > 1e-300 else numpy.nan


def ceiling(truth: Numbers, halves: Numbers) -> float:
    """Returns the correlation that the noiseless truth would have with the measured one: `sqrt(cov(half 1, half 2)) / sd(truth)`.

    The noise of the two halves is independent, so their covariance is the variance of the noiseless truth. No credit
    exceeds the ceiling but by chance. NaN if the covariance is not positive, or the truth is constant.
    """
    between = numpy.cov(halves[0], halves[1])[0, 1]
    deviation = truth.std(ddof=1)
    if between <= 0 or deviation <= 1e-150:
        return numpy.nan
    return float(numpy.sqrt(between) / deviation)


def noise_corrected(numbers: Numbers, truth: Numbers, halves: Numbers) -> float:
    """Returns the correlation with the noiseless truth, `pearson / ceiling`: `cov(x, truth) / (sd(x) sqrt(cov(halves)))`."""
    return pearson(numbers, truth) / ceiling(truth, halves)


def area_under_curve(numbers: Numbers, positive: NDArray[numpy.bool_]) -> float:
    """Returns the AUROC of the numbers for positive entries, ties counting half; NaN if all or none are positive."""
    import pandas

    num_positive = int(positive.sum())
    num_other = int((~positive).sum())
    if not num_positive or not num_other:
        return numpy.nan
    ranks = pandas.Series(numbers).rank().to_numpy()  # from 1; ties have the mean of their ranks
    pairs_in_order = ranks[positive].sum() - num_positive * (num_positive + 1) / 2
    return float(pairs_in_order / (num_positive * num_other))


def credit_figures(truth: Truth, numbers: Numbers, *, seed: int) -> dict[str, Figure]:
    """Compares a credit with A*.

    - `auroc` measures how |credit| ranks the decisive tokens within a response, as a mean over responses with one.
    - `share_on_decisive` is the part of the sum of |credit| that is on decisive tokens.
    """
    is_decisive = numpy.abs(truth.credit) > DECISIVE
    size = numpy.abs(numbers)
    # Each response's figure stands at its first measured token, so that it is drawn with its tokens.
    areas = numpy.full(len(numbers), numpy.nan)
    for tokens in truth.entries.values():
        areas[tokens[0]] = area_under_curve(size[tokens], is_decisive[tokens])

    def metrics(tokens: _Indices) -> dict[str, float]:
        drawn = numbers[tokens]
        true = truth.credit[tokens]
        halves = truth.credit_halves[:, tokens]
        decisive = is_decisive[tokens]
        total = size[tokens].sum()
        return {
            "pearson": pearson(drawn, true),
            "pearson_corrected": noise_corrected(drawn, true, halves),
            "auroc": _mean_of_defined(areas[tokens]),
            "share_on_decisive": float(size[tokens][decisive].sum() / total) if total > 0 else numpy.nan,
        }

    return bootstrap(truth.problem, metrics, seed=[seed, 3])


def contrast_figures(truth: Truth, delta: Numbers, log_probs: Numbers, *, seed: int) -> dict[str, Figure]:
    """Returns how far the evidence of decisive tokens stands out from the noise of the others.

        decisive = median |delta| over the tokens with |A*| > 0.25
        noise    = median |delta| / 0.6745 over the others with P(y_t) < 0.9
        ratio    = decisive / noise

    The noise is a standard deviation, robust against single tokens. Tokens of a higher probability had no alternative:
    their evidence is near 0 whatever the teachers know. All are (N,); `log_probs` are the policy's.
    """
    is_decisive = numpy.abs(truth.credit) > DECISIVE
    is_other = ~is_decisive & (log_probs < math.log(statistics.SURE_PROBABILITY))
    size = numpy.abs(delta)

    def metrics(tokens: _Indices) -> dict[str, float]:
        decisive = _median(size[tokens][is_decisive[tokens]])
        noise = _median(size[tokens][is_other[tokens]]) / statistics.NORMAL_MEDIAN
        return {
            "decisive": decisive,
            "noise": noise,
            "ratio": decisive / noise if noise > 0 else numpy.nan,
        }

    return bootstrap(truth.problem, metrics, seed=[seed, 3])


def _median(values: Numbers) -> float:
    """Returns the median; NaN of no values."""
    return float(numpy.median(values)) if len(values) else numpy.nan


def credit_ceiling(truth: Truth, *, seed: int) -> Figure:
    """Returns `ceiling` for A*, as a figure with its error over problems."""

    def metrics(tokens: _Indices) -> dict[str, float]:
        return {"ceiling": ceiling(truth.credit[tokens], truth.credit_halves[:, tokens])}

    return bootstrap(truth.problem, metrics, seed=[seed, 3])["ceiling"]


def _mean_of_defined(figures: Numbers) -> float:
    """Returns the mean of the figures that are not NaN; NaN if all are."""
    defined = figures[~numpy.isnan(figures)]
    return float(defined.mean()) if len(defined) else numpy.nan


def value_figures(truth: Truth, estimate: Numbers, *, seed: int) -> dict[str, Figure]:
    """Compares a value with V."""

    def metrics(tokens: _Indices) -> dict[str, float]:
        believed = estimate[tokens]
        true = truth.value[tokens]
        return {
            "pearson": pearson(believed, true),
            "pearson_corrected": noise_corrected(believed, true, truth.value_halves[:, tokens]),
        }

    return bootstrap(truth.problem, metrics, seed=[seed, 3])


def bootstrap(
    problems: _Indices, metrics: Callable[[_Indices], Mapping[str, float]], *, seed: Sequence[int]
) -> dict[str, Figure]:
    """Returns the figures of `metrics`, a function of entries, from `DRAWS` draws of as many problems with replacement.

    `problems` has the problem of each entry. Equal seeds give equal draws. Figures of a single problem have no error.
    """
    entries: dict[int, _Indices] = {}
    for problem in numpy.unique(problems).tolist():
        entries[problem] = numpy.flatnonzero(problems == problem)
    generator = numpy.random.default_rng(seed)
    results = [metrics(numpy.arange(len(problems)))]  # of all entries, then of each draw
    if len(entries) > 1:
        for _ in range(DRAWS):
            drawn_problems = generator.choice(list(entries), len(entries)).tolist()
            drawn_entries = numpy.concatenate([entries[problem] for problem in drawn_problems])
            results.append(metrics(drawn_entries))
    figures: dict[str, Figure] = {}
    for name in results[0]:
        values = [result[name] for result in results]
        figures[name] = figure_of(numpy.array(values))
    return figures


def figure_of(values: Numbers) -> Figure:
    """Builds a figure from its value, the first entry, and its bootstrap draws; non-finite draws are ignored."""
    value = values[0]
    if not numpy.isfinite(value):
        return Figure(value=None, error=None, low=None, high=None)
    draws = values[1:]
    finite_draws = draws[numpy.isfinite(draws)]
    if len(finite_draws) < 2:
        return Figure(value=float(value), error=None, low=None, high=None)
    low, high = numpy.quantile(finite_draws, [0.025, 0.975])
    return Figure(
        value=float(value),
        error=float(finite_draws.std(ddof=1)),
        low=float(low),
        high=float(high),
    )


def knowledge(signals: Sequence[MethodSignal], rollouts: Rollouts, *, seed: int) -> list[Tree]:
    """Returns the figures of `known` for the teacher of each method and view; equal ones once.

    Counted are the responses with a reference, unless it is a part of themselves other than an answer.
    """
    names: list[str] = []
    distinct_figures: list[Tree] = []
    for method in signals:
        for view in method.batch.plan.views:
            rows = _rows_with_foreign_reference(view, rollouts, method.batch.plan.answers)
            if not any(rollouts.correct[row] for row in rows):
                continue
            gain = method.batch.teacher_log_probs[view.name] - method.batch.old_log_probs  # (B, T)
            figures = known(gain, rollouts, rows, seed=seed)
            if figures not in distinct_figures:
                names.append(f"{method.label}: {view.name}")
                distinct_figures.append(figures)
    return [{"name": name, **figures} for name, figures in zip(names, distinct_figures, strict=True)]


def _rows_with_foreign_reference(view: View, rollouts: Rollouts, answers: Sequence[str | None]) -> list[int]:
    """Returns the rows whose reference is an answer, or no part of the response itself."""
    rows: list[int] = []
    for row in view.rows:
        text = view.references[row]
        ground_truth = rollouts.problems[row // rollouts.group_size].ground_truth
        is_answer = text in (ground_truth, answers[row])
        if text is None or is_answer or text.strip() not in rollouts.responses[row]:
            rows.append(row)
    return rows


def known(gain: Tensor, rollouts: Rollouts, rows: Sequence[int], *, seed: int) -> Tree:
    """Returns what a teacher knows of right responses, in nats per response.

    `nats = mean over y of sum_t gain_t`, with `gain_t = log P_teacher(y_t | x, reference, y_<t) - log P(y_t | x, y_<t)`,
    and the same for each quarter of the response. By Gibbs' inequality no teacher exceeds -log p on average, p being
    the problem's pass rate; only P(y | right) reaches it, and it does so for every right response. `limit` is the mean
    of -log p with the group's share of right responses. `wrong` is the mean of sum_t gain_t over wrong responses; it has
    no lower limit, since a teacher may know that a response cannot be right. Errors are from a bootstrap over problems.

    `gain` is (B, T), 0 on padding; `rows` are those of the responses that count, of which one is right.
    """
    gains = gain.double().numpy()
    of_right: dict[str, list[float]] = defaultdict(list)  # by figure, of each right response
    of_wrong: list[float] = []
    problems: dict[bool, list[int]] = {True: [], False: []}  # of right and of wrong responses
    for row in rows:
        number = row // rollouts.group_size
        is_right = bool(rollouts.correct[row])
        problems[is_right].append(number)
        if not is_right:
            of_wrong.append(float(gains[row].sum()))
            continue
        quarters = numpy.array_split(gains[row, : int(rollouts.response_mask[row].sum())], len(QUARTERS))
        for name, quarter in zip(QUARTERS, quarters, strict=True):
            of_right[name].append(float(quarter.sum()))
        of_right["nats"].append(sum(of_right[name][-1] for name in QUARTERS))
        pass_rate = float(rollouts.correct[list(rollouts.rows_of(number))].double().mean())
        of_right["limit"].append(-math.log(pass_rate))
    return {
        "responses": len(problems[True]),
        **_means(of_right, problems[True], seed=seed),
        **_means({"wrong": of_wrong or [math.nan]}, problems[False] or [0], seed=seed),  # NaN is undefined
    }


def _means(columns: Mapping[str, Sequence[float]], problems: Sequence[int], *, seed: int) -> dict[str, Figure]:
    """Returns the mean of each column, whose entries belong to these problems."""
    arrays = {name: numpy.array(values) for name, values in columns.items()}

    def metrics(entries: _Indices) -> dict[str, float]:
        return {name: float(values[entries].mean()) for name, values in arrays.items()}

    return bootstrap(numpy.array(problems), metrics, seed=[seed, 5])
