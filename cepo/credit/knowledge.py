"""Measures what each teacher knows of right and wrong responses before they are written, and in which part of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy
from torch import Tensor

from cepo.credit.agreement import DRAWS, figure_of
from cepo.credit.signals import MethodSignal
from cepo.trainer.asking import Rollouts
from cepo.trainer.planning import View
from cepo.trees import Tree

QUARTERS = ("first", "second", "third", "last")


def knowledge(signals: Sequence[MethodSignal], rollouts: Rollouts, *, seed: int) -> list[Tree]:
    """Returns the figures of `known` for the teacher of each method and view; equal ones once.

    Counted are the responses with a reference, unless it is a part of themselves.
    """
    found: list[Tree] = []
    for each in signals:
        for view in each.batch.plan.views:
            rows = [row for row in view.rows if not _is_own(each, view, row)]
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

    Args:
        gain: (B, T), 0 on padding.
        rows: of the responses that count; one is right.
    """
    right, wrong = ([row for row in rows if bool(rollouts.correct[row]) is which] for which in (True, False))
    table = []
    for row in right:
        length = int(rollouts.response_mask[row].sum())
        parts = [float(part.sum()) for part in numpy.array_split(gain[row, :length].double().numpy(), len(QUARTERS))]
        rate = float(rollouts.correct[list(rollouts.rows_of(row // rollouts.group_size))].double().mean())
        table.append([sum(parts), *parts, -math.log(rate)])
    names = ("nats", *QUARTERS, "limit")
    figures: Tree = dict(zip(names, _figures(table, right, rollouts, seed), strict=True))
    sums = gain[wrong].double().sum(1, keepdim=True).tolist() or [[math.nan]]  # an undefined figure where none is wrong
    figures["wrong"], *_ = _figures(sums, wrong, rollouts, seed)
    return {"responses": len(right), **figures}


def _figures(table: Sequence[Sequence[float]], rows: Sequence[int], rollouts: Rollouts, seed: int) -> list[Tree]:
    """Returns each column's mean over the rows, with draws of problems for its errors."""
    whole, problems = numpy.array(table), numpy.array([row // rollouts.group_size for row in rows])
    generator, different = numpy.random.default_rng([seed, 5]), numpy.unique(problems)
    means = [whole.mean(axis=0)]
    for _ in range(DRAWS if len(different) > 1 else 0):
        drawn = generator.choice(different, len(different))
        means.append(numpy.concatenate([whole[problems == one] for one in drawn]).mean(axis=0))
    return [dataclasses.asdict(figure_of(column)) for column in numpy.array(means).T]


def _is_own(each: MethodSignal, view: View, row: int) -> bool:
    """Whether the teacher was shown a part of the response itself, other than an answer."""
    rollouts, shown = each.batch.rollouts, view.references[row]
    answers = (rollouts.problems[row // rollouts.group_size].ground_truth, each.batch.plan.answers[row])
    return shown is not None and shown not in answers and shown.strip() in rollouts.responses[row]
