"""Computes the advantages of several methods for the same rollouts, with a step's stages plan, score and estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cepo.credit.method_list import MeasuredMethod
from cepo.credit.session import Session
from cepo.data.batch import OWN_VIEW, ScoringRow
from cepo.data.contexts import ContextBuilder
from cepo.trainer.asking import Rollouts
from cepo.trainer.planning import ScoringPlan, make_plan, rollout_groups
from cepo.trainer.scoring import ScoredBatch, with_scored
from cepo.types import TokenSignal

FIRST_STEP = 0
"""The step at which the methods' schedules are evaluated, so lambda is at its start."""

_Key = tuple[tuple[int, ...], int | None]
"""What the log-probs of a row depend on: the tokens of its context and the number of its response."""


@dataclass(frozen=True, kw_only=True)
class MethodSignal:
    """A method's scored batch, and the signal computed from it."""

    label: str
    batch: ScoredBatch
    signal: TokenSignal


def signals_of(rollouts: Rollouts, methods: Sequence[MeasuredMethod], session: Session) -> list[MethodSignal]:
    """Returns the signal of each method; rows that several methods read are scored once."""
    plans = _plans(rollouts, methods, session)
    rows = {_key(row): row for plan in plans for row in _rows(plan)}
    log_probs = dict(zip(rows, session.backend.score(list(rows.values())), strict=True)) if rows else {}
    signals: list[MethodSignal] = []
    for method, plan in zip(methods, plans, strict=True):
        scored = {row.name: log_probs[_key(row)] for row in _rows(plan)}
        old = with_scored(rollouts.sampled_log_probs, scored, OWN_VIEW)
        batch = ScoredBatch(
            plan=plan,
            old_log_probs=old,
            teacher_log_probs={view.name: with_scored(old, scored, view.name) for view in plan.views},
            token_level_rewards=rollouts.token_level_rewards,
            reference_log_probs=None,
            values=None,
            metrics={},
        )
        signal = method.estimator.signal(batch.token_batch(), step=FIRST_STEP)
        signals.append(MethodSignal(label=method.label, batch=batch, signal=signal))
    return signals


def _plans(rollouts: Rollouts, methods: Sequence[MeasuredMethod], session: Session) -> list[ScoringPlan]:
    """Plans each method with no row on-policy, so that the student's log-probs are always the trainer's own."""
    config, off_policy = session.config, torch.zeros(len(rollouts.generations), dtype=torch.bool)
    groups = rollout_groups(
        rollouts,
        session.rewards,
        session.processing,
        seed=config.trainer.seed,
        with_values=any(method.estimator.negative.select == "most_frequent" for method in methods),
    )
    plans: list[ScoringPlan] = []
    for method in methods:
        estimator = method.estimator
        contexts = ContextBuilder(
            session.processing, estimator.teacher, max_context_length=config.data.max_prompt_length
        )
        asked = groups if estimator.needs_teacher(step=FIRST_STEP) else []
        plans.append(make_plan(rollouts, asked, estimator, contexts, on_policy=off_policy, with_kl=False))
    return plans


def _rows(plan: ScoringPlan) -> list[ScoringRow]:
    return [*plan.student.values(), *(row for view in plan.views for row in view.rows.values())]


def _key(row: ScoringRow) -> _Key:
    return row.context.token_ids, row.row
