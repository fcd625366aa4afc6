"""Computes the credit of every recorded token under every method that the trace allows, for the page's credit view.

The methods' own code runs here, on the log-probs of the trace; the page only shows the results. Each step is one block
of compressed JSON.
"""

from __future__ import annotations

import base64
import gzip
import io
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy

from cepo.algorithms import Estimator, available_estimators, build_estimator, credit, section_of
from cepo.algorithms.settings import DEFAULT_ESTIMATOR
from cepo.algorithms.token_batches import at_last_token, response_mask_of, with_rows
from cepo.data.images import open_image
from cepo.files.foreign import damaged_as
from cepo.files.trees import Fields, Tree
from cepo.report.recorded_run import RunData
from cepo.run_folder.trace import STUDENT, GroupRecord, RolloutRecord, read_rollouts
from cepo.run_folder.writing import finite_or_none
from cepo.types import TokenBatch

if TYPE_CHECKING:
    from torch import Tensor

_MOST_BYTES = 15_000_000
"""If the blocks of all steps exceed this size together, the page has every second of them, and so on."""
_LARGEST_IMAGE = 640
_ADVANTAGE = "advantage"


def credit_view(run: RunData) -> Tree | None:
    """Returns the data of the page's credit view: an index of all rollouts, a block per step, and the rollout whose evidence
    is clearest, on which it opens; None without a trace.
    """
    blocks: dict[int, str] = {}
    index: list[tuple[int, int, str, bool]] = []
    clearest = (-math.inf, 0, 0)
    for step, groups_of_step in itertools.groupby(read_rollouts(run.folder), key=lambda group: group.step):
        groups = list(groups_of_step)
        blocks[step] = _packed(step_credit(run, groups))
        place = 0  # of a rollout among those of the step
        for group in groups:
            for rollout in group.rollouts:
                text = f"{group.prompt_id}: {group.problem}\n{rollout.response}".lower()
                index.append((step, place, text, rollout.right))
                clearest = max(clearest, (_clarity(rollout), step, -place))  # of equals the first of the last step
                place += 1
    if not blocks:
        return None
    _, start, negated_place = clearest
    while len(blocks) > 1 and sum(map(len, blocks.values())) > _MOST_BYTES:
        steps = list(blocks)
        parity = steps.index(start) % 2  # the step on which the view opens stays
        blocks = {step: blocks[step] for step in steps[parity::2]}
    index = [entry for entry in index if entry[0] in blocks]
    return {"start": [start, -negated_place], "steps": list(blocks), "index": _packed(index), "blocks": blocks}


def step_credit(run: RunData, groups: Sequence[GroupRecord]) -> Tree:
    """Returns what the page shows of a step. A rollout's columns are its log-probs by view, then each method's values.

    The run's own method has the recorded values. Other methods are left out if they read what the trace lacks: a
    critic, a greedy response, the whole vocabulary, or a view that was not recorded.
    """
    batch = _token_batch(groups)
    signals: dict[str, dict[str, numpy.ndarray]] = {run.estimator: {}}  # the run's own method is first
    for name, method in _comparable(run, groups):
        signals[name] = _signal_columns(method, batch, groups)
    rollouts: list[Tree] = []
    for place, group in enumerate(groups):
        for rollout in group.rollouts:
            row = len(rollouts)
            columns: list[Fields] = [rollout.log_probs]
            for name, values in signals.items():
                computed: Tree = {key: value[row, : len(rollout.tokens)] for key, value in values.items()}
                if name == run.estimator:
                    computed |= _recorded_columns(rollout)
                columns.append(computed)
            rollouts.append(_rollout_entry(rollout, place, columns))
    always_shown = (run.estimator, DEFAULT_ESTIMATOR)
    return {
        "step": groups[0].step,
        "methods": list(signals),
        "shown": [name for name, values in signals.items() if "delta" in values or name in always_shown],
        "groups": [_group_header(group) for group in groups],
        "rollouts": rollouts,
    }


def _recorded_columns(rollout: RolloutRecord) -> Tree:
    """Returns what the run's own method recorded of a rollout's tokens."""
    columns = {_ADVANTAGE: rollout.token_advantages, "delta": rollout.delta, "weight": rollout.weight}
    return {name: values for name, values in columns.items() if values is not None}


def _rollout_entry(rollout: RolloutRecord, place: int, columns: Sequence[Fields]) -> Tree:
    entry: Tree = {"group": place, "columns": [_rounded(values) for values in columns]}
    for field in ("tokens", "reward", "accuracy", "finished", "is_scored", "references"):
        entry[field] = getattr(rollout, field)
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


def _comparable(run: RunData, groups: Sequence[GroupRecord]) -> Iterator[tuple[str, Estimator]]:
    """Yields the registered methods that can be computed from the trace."""
    recorded = set(groups[0].rollouts[0].log_probs)
    is_compared = min(len(group.rollouts) for group in groups) > 1
    for name in available_estimators():
        method = build_estimator(name, section_of(name, run.setting("algorithm", {})))
        if "values" in method.reads or "reward_baselines" in method.reads or method.distilled_view is not None:
            continue
        has_group = is_compared or "group_ids" not in method.reads
        if has_group and set(method.views) <= recorded:
            yield name, method


def _signal_columns(method: Estimator, batch: TokenBatch, groups: Sequence[GroupRecord]) -> dict[str, numpy.ndarray]:
    """Returns a method's columns (B, T): its advantages and diagnostics."""
    signal = method.checked_signal(batch, step=groups[0].step - 1)
    columns = {_ADVANTAGE: signal.advantages, **signal.diagnostics}
    smallest_group = min(len(group.rollouts) for group in groups)
    if "delta" in columns and "value" not in columns and smallest_group > 1:
        prior, _ = credit.pass_rate_of_others(batch.correct.float(), batch.group_ids)
        columns["value"] = credit.evidence_values(prior, columns["delta"])
    return {name: values.float().numpy() for name, values in columns.items()}


def _clarity(rollout: RolloutRecord) -> float:
    """Returns how clearly evidence picks out a few tokens: the three largest shifts less half of the others; -1e9 without."""
    values = rollout.delta or [0.0]
    if rollout.weight:
        values = [weight - 1 for weight in rollout.weight]
    shifts = numpy.sort(numpy.nan_to_num(numpy.abs(values)))
    if shifts[-1] <= 0:
        return -1e9
    return float(shifts[-3:].sum() - shifts[:-3].sum() / 2)


def _group_header(group: GroupRecord) -> Tree:
    return {
        "prompt_id": group.prompt_id,
        "problem": group.problem,
        "ground_truth": group.ground_truth,
        "right": sum(rollout.right for rollout in group.rollouts),
        "size": len(group.rollouts),
        "images": [_data_uri(png) for png in group.images],
    }


def _data_uri(png: bytes) -> str:
    image = open_image(png, formats=("PNG", "JPEG"))
    if max(image.size) > _LARGEST_IMAGE:
        smaller = io.BytesIO()
        with damaged_as(Path("an image of the run"), "cannot be decoded"):
            image.thumbnail((_LARGEST_IMAGE, _LARGEST_IMAGE))
            image.save(smaller, format="WEBP", quality=80)
        return "data:image/webp;base64," + base64.b64encode(smaller.getvalue()).decode()
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _packed(content: object) -> str:
    text = json.dumps(content).encode()
    compressed = gzip.compress(text, compresslevel=6, mtime=0)  # without a time, so that equal runs give equal pages
    return base64.b64encode(compressed).decode()
