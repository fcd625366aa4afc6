"""Measures, before any run, what must hold for the study to be able to show something: its gates.

All figures are those of one sample: `prompts` problems with 8 responses each at temperature 1, and the two teachers of the
gate reading the data set's solution and a wrong response of the group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from cepo.algorithms import statistics
from cepo.commands.measure_credit import make_credit_plan
from cepo.credit.agreement import MethodSignal, knowledge, signals_of
from cepo.credit.resources import opened
from cepo.trainer.rollouts import Rollouts
from lab.studies.running_totals.grading import (
    decisive_places,
    number_places,
    pieces_of,
    statements,
    tokens_at,
    totals_of,
)

Flags = NDArray[numpy.bool_]
Numbers = NDArray[numpy.float64]


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What a figure must be at least, or at most."""

    name: str
    least: float | None = None
    most: float | None = None

    def holds(self, value: float | None) -> bool:
        """Returns whether the figure passes; an undefined one does not."""
        if value is None:
            return False
        if self.least is not None and not value >= self.least:
            return False
        return self.most is None or value <= self.most


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The tokens of the responses of mixed groups, one after another; N entries each."""

    delta: Numbers  # contrast of the teachers, in nats
    log_probs: Numbers  # of the student
    gate: Numbers  # the weight that the gate gives
    is_number: Flags  # a digit of a stated total or of the answer
    is_decisive: Flags  # by the programme
    of_right: Flags  # the response is right

    @property
    def is_style(self) -> Flags:
        """Tokens that state no number and had an alternative."""
        return ~self.is_number & (self.log_probs < math.log(statistics.SURE_PROBABILITY))


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Responses, and what methods make of them; the first method is the gate that is measured."""

    rollouts: Rollouts
    methods: Sequence[MethodSignal]
    pieces: Sequence[Sequence[str]]  # the text of each token of each response; control tokens have none


def sampled(settings: Sequence[str], *, methods: str, prompts: int, folder: Path) -> Sample:
    """Samples the responses of a first step, and has the teachers of all methods score them.

    `methods` is a list as `cepo credit` reads it.
    """
    plan = make_credit_plan(
        methods=methods,
        settings=[*settings, f"data.rollout_batch_size={prompts}", f"worker.actor.global_batch_size={prompts}"],
        out=str(folder),
    )
    with opened(plan.config, plan.actor, plan.methods.values()) as session:
        rollouts = session.sample(0, with_baselines=False)
        _, *signals = signals_of(rollouts, plan.methods, session)  # the first is uniform credit
        tokenizer = session.processing.tokenizer
        pieces = [pieces_of(tokenizer, generation.response_ids.tolist()) for generation in rollouts.generations]
    return Sample(rollouts=rollouts, methods=signals, pieces=pieces)


def totals_of_row(sample: Sample, row: int) -> list[int]:
    """Returns the right totals of a response's problem."""
    solution = sample.rollouts.problems[row // sample.rollouts.group_size].solution
    assert solution is not None
    return totals_of(solution)


def tokens_of(sample: Sample, contrast: MethodSignal | None = None) -> Tokens:
    """Returns the tokens of all responses whose teachers read both references, with a method's contrast or the gate's."""
    rollouts = sample.rollouts
    gate = sample.methods[0]
    has_both = gate.batch.has_reference["correct"] & gate.batch.has_reference["wrong"]
    delta = (contrast or gate).signal.diagnostics["delta"]
    weight = gate.signal.diagnostics["weight"]
    columns: dict[str, list[Any]] = {name: [] for name in Tokens.__annotations__}
    rows: list[int] = torch.nonzero(has_both).flatten().tolist()  # torch leaves its type open
    for row in rows:
        pieces = sample.pieces[row]
        text = "".join(pieces)
        totals = totals_of_row(sample, row)
        length = len(pieces)
        columns["delta"] += delta[row, :length].tolist()
        columns["gate"] += weight[row, :length].tolist()
        columns["log_probs"] += rollouts.sampled_log_probs[row, :length].tolist()
        columns["is_number"] += tokens_at(number_places(text, totals), pieces)
        columns["is_decisive"] += tokens_at(decisive_places(text, totals), pieces)
        columns["of_right"] += [bool(rollouts.correct[row])] * length
    flags = ("is_number", "is_decisive", "of_right")
    arrays = {name: numpy.array(values, dtype=bool if name in flags else float) for name, values in columns.items()}
    return Tokens(**arrays)


def robust_deviation(values: Numbers) -> float | None:
    """Returns the standard deviation around 0 that normal values with this median size have; None of no values."""
    size = _median(numpy.abs(values))
    return None if size is None else size / statistics.NORMAL_MEDIAN


Figures = dict[str, float | None]
"""Figures by name; None where a sample does not define one, for example the knowledge of right responses without any."""


def figures_of(sample: Sample, *, seed: int) -> Figures:
    """Returns the figures that bounds of the plan are about, and those that explain them."""
    rollouts = sample.rollouts
    figures: Figures = {
        "pass_rate": float(rollouts.correct.double().mean()),
        "stopped": float(rollouts.finished.double().mean()),
        "right_numbers": _mean(numpy.array(_right_numbers(sample))),
        "mean_length": float(rollouts.response_mask.sum(dim=1).double().mean()),
    }
    figures |= _knowledge_figures(sample.methods[0], rollouts, seed=seed)
    return figures | _token_figures(sample)


def _knowledge_figures(gate: MethodSignal, rollouts: Rollouts, *, seed: int) -> Figures:
    """Returns what the right teacher knows of right and of wrong responses, in nats, and the limit of the first."""
    known = {row["name"].rpartition(": ")[2]: row for row in knowledge([gate], rollouts, seed=seed)}
    if "correct" not in known:
        names = ("knowledge_of_right", "knowledge_of_right_error", "limit", "knowledge_of_right_over_limit")
        return dict.fromkeys((*names, "knowledge_of_wrong"))
    correct = known["correct"]
    nats, limit = correct["nats"]["value"], correct["limit"]["value"]
    return {
        "knowledge_of_right": nats,
        "knowledge_of_right_error": correct["nats"]["error"],
        "limit": limit,
        "knowledge_of_right_over_limit": nats / limit,
        "knowledge_of_wrong": correct["wrong"]["value"],
    }


def _token_figures(sample: Sample) -> Figures:
    """Returns how contrast and gate differ between the tokens that decided, other numbers, and style."""
    tokens = tokens_of(sample)
    surprisal = -tokens.log_probs
    is_open = tokens.gate == 1.0
    first_error = tokens.is_decisive & ~tokens.of_right
    contrasts: Figures = {}
    for method in sample.methods[1:]:
        of_method = _contrast_figures(tokens_of(sample, method))
        contrasts |= {f"{name} of {method.label.partition('(')[0]}": value for name, value in of_method.items()}
    return {
        "style_entropy_share": float(surprisal[~tokens.is_number].sum() / surprisal.sum()) if surprisal.any() else None,
        "estimated_noise": sample.methods[0].signal.metrics["evidence/noise"].result,
        **_contrast_figures(tokens),
        "open_on_first_errors": _mean(is_open[first_error]),
        "open_on_numbers_of_right": _mean(is_open[tokens.is_number & tokens.of_right]),
        "open_on_style": _mean(is_open[tokens.is_style]),
        "open_on_all": _mean(is_open),
        **contrasts,
    }


def _contrast_figures(tokens: Tokens) -> Figures:
    """Returns the size of a contrast at first errors and at right numbers, in nats, its noise on style, and their ratio."""
    noise = robust_deviation(tokens.delta[tokens.is_style])
    first_error = _median(numpy.abs(tokens.delta[tokens.is_decisive & ~tokens.of_right]))
    return {
        "noise": noise,
        "first_error_contrast": first_error,
        "right_number_contrast": _median(numpy.abs(tokens.delta[tokens.is_number & tokens.of_right])),
        "contrast_to_noise": first_error / noise if first_error is not None and noise else None,
    }


def _mean(values: NDArray[Any]) -> float | None:
    return float(values.mean()) if len(values) else None


def _median(values: Numbers) -> float | None:
    return float(numpy.median(values)) if len(values) else None


def _right_numbers(sample: Sample) -> list[bool]:
    """Returns of each stated number whether it is right, of all responses."""
    verdicts: list[bool] = []
    for row, response in enumerate(sample.rollouts.responses):
        verdicts += [statement.is_right for statement in statements(response, totals_of_row(sample, row))]
    return verdicts


def bounds_of(written: Mapping[str, Mapping[str, float]]) -> list[Bound]:
    """Returns the bounds that a plan has, by the names of figures."""
    return [Bound(name=name, **limits) for name, limits in written.items()]


def verdicts(figures: Mapping[str, float | None], bounds: Sequence[Bound]) -> dict[str, bool]:
    """Returns which gates hold."""
    return {bound.name: bound.holds(figures[bound.name]) for bound in bounds}
