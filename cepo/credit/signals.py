"""Computes the signals of several methods for the same rollouts, and from them the credits that are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from cepo.algorithms import Estimator, credit
from cepo.credit.session import Session
from cepo.credit.truth import Numbers, Truth
from cepo.data.batch import ScoringRow
from cepo.data.contexts import ContextBuilder
from cepo.trainer.asking import Rollouts
from cepo.trainer.planning import ScoredBatch, ScoringPlan, make_plan, rollout_groups, scored_batch
from cepo.types import TokenSignal

FIRST_STEP = 0
"""The step at which the methods' schedules are evaluated, so lambda is at its start."""


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
        with_values=any(method.negative.select == "most_frequent" for method in methods.values()),
    )
    # No row is on-policy, so that the student's log-probs are always the trainer's own.
    off_policy = torch.zeros(len(rollouts.generations), dtype=torch.bool)
    plans: list[ScoringPlan] = []
    for method in methods.values():
        contexts = ContextBuilder(session.processing, method.teacher, max_context_length=config.data.max_prompt_length)
        asked = groups if method.needs_teacher(step=FIRST_STEP) else []
        plans.append(make_plan(rollouts, asked, method, contexts, on_policy=off_policy, with_kl=False))
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
