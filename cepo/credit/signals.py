"""Computes the advantages of several methods for the same rollouts, and writes a trace of each measured response.

`traces.jsonl` has one JSON object per line:

- `prompt_id`, `problem`, `ground_truth`: of the problem; `image`: file of its first image in the folder, or null.
- `row`: number of the response among the rollouts; `response`, `reward`, `correct`.
- `tokens`: T texts; `token_ids`: T numbers.
- `values`: T + 1 numbers, V before each token and after the last; null where not measured.
- `credit`: T numbers, A*; null where not measured.
- `advantages`: method -> T numbers.
- `evidence`: method -> name -> T numbers that the method recorded, such as `delta`, `weight` or `value`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch import Tensor

from cepo.credit.agreement import response_rows
from cepo.credit.method_list import MeasuredMethod
from cepo.credit.session import Session
from cepo.credit.truth import Truth
from cepo.data.batch import OWN_VIEW, ScoringRow
from cepo.data.contexts import ContextBuilder
from cepo.models.processing import Processing
from cepo.tracking.lines import encode_line, finite_or_none
from cepo.tracking.run_folder import png_bytes, write_atomically
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


FILE, IMAGES = "traces.jsonl", "images"


def write_traces(
    folder: Path, rollouts: Rollouts, truth: Truth, signals: Sequence[MethodSignal], processing: Processing
) -> None:
    """Writes the traces of all measured responses, and the images of their problems."""
    (folder / IMAGES).mkdir(exist_ok=True)
    lines = [_trace(folder, rollouts, truth, signals, processing, row) for row in response_rows(truth)]
    write_atomically(folder / FILE, b"".join(map(encode_line, lines)).decode("utf-8"))


def _trace(
    folder: Path, rollouts: Rollouts, truth: Truth, signals: Sequence[MethodSignal], processing: Processing, row: int
) -> Mapping[str, object]:
    number = row // rollouts.group_size
    problem, tokens = rollouts.problems[number], rollouts.generations[row].response_ids
    image = None
    if problem.images:
        image = f"{IMAGES}/{number}.png"
        (folder / image).write_bytes(png_bytes(problem.images[0]))

    def of_tokens(tensor: Tensor) -> list[float | None]:
        return [finite_or_none(float(value)) for value in tensor[row, : len(tokens)]]

    values: list[float | None] = [None] * (len(tokens) + 1)
    credit: list[float | None] = [None] * len(tokens)
    for index in numpy.flatnonzero(truth.row == row):
        token = int(truth.token[index])
        credit[token] = float(truth.credit[index])
        values[token] = float(truth.value[index])
        values[token + 1] = float(truth.value[index] + truth.credit[index])
    return {
        "prompt_id": problem.prompt_id,
        "problem": problem.text,
        "ground_truth": problem.ground_truth,
        "image": image,
        "row": row,
        "response": rollouts.responses[row],
        "reward": float(rollouts.rewards[row]),
        "correct": bool(rollouts.correct[row]),
        "tokens": processing.token_texts(tokens),
        "token_ids": list(tokens),
        "values": values,
        "credit": credit,
        "advantages": {each.label: of_tokens(each.signal.advantages) for each in signals},
        "evidence": {
            each.label: {name: of_tokens(tensor) for name, tensor in each.signal.diagnostics.items()}
            for each in signals
            if each.signal.diagnostics
        },
    }
