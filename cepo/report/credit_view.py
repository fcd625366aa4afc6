"""Computes the credit of every recorded token under every method that the trace allows, for the page's credit view.

The methods' own code runs here, on the log-probs of the trace; the page only shows the results. Each step is one block
of compressed JSON.
"""

from __future__ import annotations

import base64
import gzip
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

import numpy

from cepo.algorithms import Estimator, statistics
from cepo.algorithms.evidence import beliefs
from cepo.algorithms.masking import at_last_token, response_mask_of, with_rows
from cepo.algorithms.settings import DEFAULT_ESTIMATOR
from cepo.files.trees import Fields, Tree
from cepo.report.recorded_run import RunData
from cepo.report.replayable_methods import comparable_methods
from cepo.report.response_pair import Contrast, clearest_pair, contrast_of
from cepo.report.shown_responses import data_uri
from cepo.run_folder.trace import STUDENT, GroupRecord, RolloutRecord, read_rollouts
from cepo.run_folder.writing import finite_or_none
from cepo.types import TokenBatch, TokenSignal

if TYPE_CHECKING:
    from torch import Tensor

_MOST_BYTES = 15_000_000
"""If the blocks of all steps exceed this size together, the page has every second of them, and so on."""
_ADVANTAGE = "advantage"
_DELTA = "delta"
_VALUE = "value"


@dataclass(frozen=True, kw_only=True)
class CreditView:
    """The contrast that opens the page with the image of its problem, and the data of the page's script."""

    contrast: Contrast
    first_place: int  # of the contrast's group among the rollouts of its step
    image: str | None
    data: Tree  # an index of all rollouts, and a block per step


def credit_view(run: RunData) -> CreditView | None:
    """Returns the credit view of a run, which opens on the response with the clearest blame; None without a trace."""
    blocks: dict[int, str] = {}
    index: list[tuple[int, int, str, bool]] = []
    clearest: _Candidate | None = None
    for step, groups_of_step in itertools.groupby(read_rollouts(run.folder), key=lambda group: group.step):
        groups = list(groups_of_step)
        columns = step_credit(run, groups)
        blocks[step] = _packed(columns)
        first_place = 0  # of the group's rollouts among those of the step
        for group in groups:
            rank, places = clearest_pair(group.rollouts)
            if clearest is None or rank >= clearest.rank:  # of equals the last
                clearest = _Candidate(rank=rank, group=group, places=places, first_place=first_place, columns=columns)
            for place, rollout in enumerate(group.rollouts, first_place):
                text = f"{group.prompt_id}: {group.problem}\n{rollout.response}".lower()
                index.append((step, place, text, rollout.right))
            first_place += len(group.rollouts)
    if clearest is None:
        return None
    start = clearest.group.step
    blocks = _thinned(blocks, start)
    data = {
        "start": [start, clearest.first_place + clearest.places[-1]],  # the wrong one of a pair
        "steps": list(blocks),
        "index": _packed([entry for entry in index if entry[0] in blocks]),
        "blocks": blocks,
    }
    images = clearest.group.images
    return CreditView(
        contrast=_contrast(run, clearest),
        first_place=clearest.first_place,
        image=data_uri(images[0]) if images else None,
        data=data,
    )


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """The responses that may open the page, by their places in their group, with the data of their step."""

    rank: tuple[bool, bool, float]
    group: GroupRecord
    places: Sequence[int]
    first_place: int
    columns: Tree


def _contrast(run: RunData, candidate: _Candidate) -> Contrast:
    """Returns the contrast with the plain method's credit, or if that cannot be computed with each response's mean."""
    methods: list[str] = candidate.columns["methods"]
    baseline: str | None = None
    uniform_advantages: list[float] | None = None
    if DEFAULT_ESTIMATOR in methods:
        baseline = DEFAULT_ESTIMATOR
        number = methods.index(baseline) + 1
        uniform_advantages = []
        for place in candidate.places:
            entry = candidate.columns["rollouts"][candidate.first_place + place]
            advantages = entry["columns"][number][_ADVANTAGE]
            uniform_advantages.append(fmean(advantages or [0.0]))
    return contrast_of(
        candidate.group,
        candidate.places,
        method=run.estimator,
        baseline=baseline,
        uniform_advantages=uniform_advantages,
        beliefs=beliefs_of(candidate.group),
    )


def beliefs_of(group: GroupRecord) -> dict[int, list[float]]:
    """Returns P(right) before each token, by place; nothing if the trace has no teacher with the right answer."""
    if len(group.rollouts) < 2 or "correct" not in group.rollouts[0].log_probs:
        return {}
    rows = zip(group.rollouts, beliefs(_token_batch([group])), strict=True)  # of (B, T)
    return {place: values[: len(rollout.tokens)].tolist() for place, (rollout, values) in enumerate(rows)}


def _thinned(blocks: dict[int, str], start: int) -> dict[int, str]:
    """Drops every second step until the rest is small enough; the step `start`, on which the view opens, stays."""
    while len(blocks) > 1 and sum(map(len, blocks.values())) > _MOST_BYTES:
        steps = list(blocks)
        parity = steps.index(start) % 2
        blocks = {step: blocks[step] for step in steps[parity::2]}
    return blocks


@dataclass(frozen=True, kw_only=True)
class _MethodCredit:
    """What a method makes of the B rollouts of a step, of at most T tokens."""

    columns: Mapping[str, numpy.ndarray] = field(default_factory=dict[str, "numpy.ndarray"])  # (B, T) by name
    clip_rates: Mapping[int, Tree] = field(default_factory=dict[int, Tree])  # by rollout; see `clip_rates`


def step_credit(run: RunData, groups: Sequence[GroupRecord]) -> Tree:
    """Returns what the page shows of a step. A rollout's columns are its log-probs by view, then each method's values.

    The run's own method has the recorded values; the others are those of `comparable_methods`. Statistics of a batch, such
    as VPPO's scale, are those of the recorded groups.
    """
    batch = _token_batch(groups)
    methods = {run.estimator: _MethodCredit()}  # the run's own method is first
    for name, method in comparable_methods(run, groups):
        methods[name] = _method_credit(method, batch, groups)
    rollouts: list[Tree] = []
    for place, group in enumerate(groups):
        for rollout in group.rollouts:
            row = len(rollouts)
            columns: list[Fields] = [rollout.log_probs]
            rates: list[Tree | None] = []
            for name, method_credit in methods.items():
                computed: Tree = {}
                for key, values in method_credit.columns.items():
                    computed[key] = values[row, : len(rollout.tokens)]
                if name == run.estimator:
                    computed |= _recorded_columns(rollout)
                columns.append(computed)
                rates.append(method_credit.clip_rates.get(row))
            entry = _rollout_entry(rollout, place, columns)
            entry["clip_rates"] = rates
            rollouts.append(entry)
    always_shown = (run.estimator, DEFAULT_ESTIMATOR)
    return {
        "step": groups[0].step,
        "methods": list(methods),
        "shown": [name for name, values in methods.items() if _DELTA in values.columns or name in always_shown],
        "groups": [_group_header(group) for group in groups],
        "rollouts": rollouts,
    }


def _recorded_columns(rollout: RolloutRecord) -> Tree:
    """Returns what the run's own method recorded of a rollout's tokens."""
    columns = {
        _ADVANTAGE: rollout.token_advantages,
        _DELTA: rollout.delta,
        "weight": rollout.weight,
    }
    return {name: values for name, values in columns.items() if values is not None}


def _rollout_entry(rollout: RolloutRecord, place: int, columns: Sequence[Fields]) -> Tree:
    entry: Tree = {"group": place, "columns": [_rounded(values) for values in columns]}
    for name in ("tokens", "reward", "accuracy", "finished", "is_scored", "references"):
        entry[name] = getattr(rollout, name)
    return entry


def _rounded(columns: Fields) -> Tree:
    """Returns the columns that were measured, as numbers that JSON can hold."""
    numbers: Tree = {}
    for name, values in columns.items():
        if values is not None:
            rounded = numpy.asarray(values, numpy.float64).round(6)
            numbers[name] = [finite_or_none(value) for value in rounded]
    return numbers


def _token_batch(groups: Sequence[GroupRecord]) -> TokenBatch:
    """Returns the batch that a method reads, of the recorded rollouts of a step; rewards are outcomes."""
    import torch

    rollouts: list[RolloutRecord] = []
    group_ids: list[int] = []
    for place, group in enumerate(groups):
        rollouts += group.rollouts
        group_ids += [place] * len(group.rollouts)
    mask = response_mask_of(torch.tensor([len(rollout.tokens) for rollout in rollouts]))
    old_log_probs = with_rows(torch.zeros(mask.shape), _recorded_rows(rollouts, STUDENT))
    teacher_log_probs: dict[str, Tensor] = {}
    has_reference: dict[str, Tensor] = {}
    for view in rollouts[0].log_probs:
        if view != STUDENT:
            teacher_log_probs[view] = with_rows(old_log_probs, _recorded_rows(rollouts, view))
            has_reference[view] = torch.tensor([rollout.references.get(view) is not None for rollout in rollouts])
    return TokenBatch(
        token_level_rewards=at_last_token(torch.tensor([rollout.reward for rollout in rollouts]), mask),
        response_mask=mask,
        old_log_probs=old_log_probs,
        group_ids=torch.tensor(group_ids),
        teacher_log_probs=teacher_log_probs,
        correct=torch.tensor([rollout.right for rollout in rollouts]),
        has_reference=has_reference,
    )


def _recorded_rows(rollouts: Sequence[RolloutRecord], view: str) -> dict[int, Tensor]:
    """Returns the log-probs of the rollouts that a view scored, by their place."""
    import torch

    rows: dict[int, Tensor] = {}
    for row, rollout in enumerate(rollouts):
        log_probs = rollout.log_probs.get(view)
        if log_probs is not None:
            rows[row] = torch.tensor(log_probs)
    return rows


def _method_credit(method: Estimator, batch: TokenBatch, groups: Sequence[GroupRecord]) -> _MethodCredit:
    """Computes a method's advantages and diagnostics, and the value of each prefix by its evidence."""
    step_of_schedules = groups[0].step - 1  # 0-based
    signal = method.checked_signal(batch, step=step_of_schedules)
    columns = {_ADVANTAGE: signal.advantages, **signal.diagnostics}
    smallest_group = min(len(group.rollouts) for group in groups)
    needs_value = _DELTA in columns and _VALUE not in columns
    if needs_value and smallest_group > 1:  # the pass rate is that of the group's other rollouts
        pass_rate, _ = statistics.pass_rate_of_others(batch.correct.float(), batch.group_ids)
        columns[_VALUE] = statistics.evidence_values(pass_rate, columns[_DELTA])
    arrays: dict[str, numpy.ndarray] = {}
    for name, values in columns.items():
        arrays[name] = values.float().numpy()
    return _MethodCredit(columns=arrays, clip_rates=clip_rates(signal, batch.response_mask))


def clip_rates(signal: TokenSignal, response_mask: Tensor) -> dict[int, Tree]:
    """Returns the rates of a method's responses, by row of `response_mask` (B, T).

    They are the shares of the tokens with an advantage, `tokens` in number, whose weight the `lower` bound 1 - r clips,
    and the `upper` bound 1 + r: `evidence/clip_low_rate` and `evidence/clip_high_rate`. A response without any such token
    has none, and so have all those of a method that clips no weights.
    """
    clipping = signal.diagnostics.get("clipping")  # (B, T)
    if clipping is None:
        return {}
    counted = response_mask & (statistics.advantage_sign(signal.advantages) != 0)
    lower = statistics.response_means((clipping < 0).float(), counted).tolist()  # (B,)
    upper = statistics.response_means((clipping > 0).float(), counted).tolist()  # (B,)
    rates: dict[int, Tree] = {}
    for row, num_tokens in enumerate(counted.sum(dim=1).tolist()):
        if num_tokens:
            rates[row] = {"lower": lower[row], "upper": upper[row], "tokens": num_tokens}
    return rates


def _group_header(group: GroupRecord) -> Tree:
    return {
        "prompt_id": group.prompt_id,
        "problem": group.problem,
        "ground_truth": group.ground_truth,
        "right": sum(rollout.right for rollout in group.rollouts),
        "size": len(group.rollouts),
        "images": [data_uri(png) for png in group.images],
    }


def _packed(content: object) -> str:
    text = json.dumps(content).encode()
    compressed = gzip.compress(text, compresslevel=6, mtime=0)  # without a time, so that equal runs give equal pages
    return base64.b64encode(compressed).decode()
