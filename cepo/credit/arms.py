"""Builds the credits that are compared: those of the methods, their evidence, baselines and controls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from cepo.algorithms import credit
from cepo.credit.signals import MethodSignal
from cepo.credit.truth import Numbers, Truth
from cepo.trainer.asking import Rollouts


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A credit or a value of the measured tokens.

    Attributes:
        kind: "method", "evidence" or "baseline".
        numbers: (N,), one per measured token.
    """

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
    surprisal = -_at(truth, rollouts.sampled_log_probs)
    noise = numpy.random.default_rng([seed, 1]).uniform(0.0, 2.0, len(truth.row))
    baselines = [
        Arm(name="position", kind="baseline", numbers=uniform * (truth.token + 1) / lengths),
        Arm(name="surprisal", kind="baseline", numbers=uniform * surprisal),
        Arm(name="entropy", kind="baseline", numbers=uniform * truth.entropy),
        Arm(name="random", kind="baseline", numbers=uniform * noise),
    ]
    arms: list[Arm] = []
    for each in signals:
        own = _at(truth, each.signal.advantages)
        arms.append(Arm(name=each.label, kind="method", numbers=own))
        mean = _response_means(truth, own)
        if numpy.allclose(own, mean):
            continue
        arms.append(Arm(name=f"{each.label}, inverted", kind="baseline", numbers=2 * mean - own))
        arms.append(Arm(name=f"{each.label}, permuted", kind="baseline", numbers=_permuted(truth, own, seed)))
    evidence: list[Arm] = []
    for each in signals:
        belief = _belief(each, rollouts)
        if belief is not None:
            moved = numpy.diff(belief, axis=1)[truth.row, truth.token]
            evidence.append(Arm(name=f"{each.label}: difference of belief", kind="evidence", numbers=moved))
        if "delta" in each.signal.diagnostics:
            delta = _at(truth, each.signal.diagnostics["delta"])
            evidence.append(Arm(name=f"{each.label}: delta", kind="evidence", numbers=delta))
    return [arms[0], *baselines, *arms[1:], *_different(evidence)]


def value_arms(truth: Truth, rollouts: Rollouts, signals: Sequence[MethodSignal]) -> list[Arm]:
    """Returns the beliefs about prefixes: the smoothed pass rate of the other rollouts, and each method's belief."""
    prior = _prior(rollouts).numpy()
    evidence: list[Arm] = []
    for each in signals:
        belief = _belief(each, rollouts)
        if belief is not None:
            evidence.append(Arm(name=each.label, kind="evidence", numbers=belief[truth.row, truth.token]))
    return [Arm(name="pass rate of the others", kind="baseline", numbers=prior[truth.row]), *_different(evidence)]


def _different(arms: Sequence[Arm]) -> list[Arm]:
    """Drops arms that have the numbers of an earlier arm, since methods may read the same evidence."""
    kept: list[Arm] = []
    for arm in arms:
        if not any(numpy.array_equal(arm.numbers, other.numbers) for other in kept):
            kept.append(arm)
    return kept


def _belief(each: MethodSignal, rollouts: Rollouts) -> Numbers | None:
    """(B, T + 1), the believed probability of a correct answer before and after each token; None without evidence.

    If a method records `value`, this is used as it is, and the belief after the last token is that before it. If it
    records `delta`, the belief is `b_t = sigmoid(logit p + sum_{s<t} delta_s)`, with p the smoothed pass rate of the
    other rollouts.
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
    """(B,) the smoothed pass rate of the other rollouts."""
    return credit.pass_rate_of_others(rollouts.correct.double(), rollouts.group_ids)[0]


def _at(truth: Truth, tensor: Tensor) -> Numbers:
    """The entries of a (B, T) tensor at the measured tokens."""
    return tensor.double().numpy()[truth.row, truth.token]


def _response_means(truth: Truth, numbers: Numbers) -> Numbers:
    _, index = numpy.unique(truth.row, return_inverse=True)
    return (numpy.bincount(index, numbers) / numpy.bincount(index))[index]


def _permuted(truth: Truth, numbers: Numbers, seed: int) -> Numbers:
    result = numbers.copy()
    for row in numpy.unique(truth.row):
        indices = numpy.flatnonzero(truth.row == row)
        result[indices] = numbers[numpy.random.default_rng([seed, 2, row]).permutation(indices)]
    return result
