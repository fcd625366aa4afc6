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
    for step, recorded in itertools.groupby(read_rollouts(run.folder), key=lambda group: group.step):
        groups = list(recorded)
        blocks[step] = _packed(step_credit(run, groups))
        for place, (group, rollout) in enumerate((each, rollout) for each in groups for rollout in each.rollouts):
            text = f"{group.prompt_id}: {group.problem}\n{rollout.response}".lower()
            index.append((step, place, text, rollout.right))
            clearest = max(clearest, (_clarity(rollout), step, -place))
    if not blocks:
        return None
    _, start, place = clearest
    while len(blocks) > 1 and sum(map(len, blocks.values())) > _MOST_BYTES:
        steps = list(blocks)
        blocks = {step: blocks[step] for step in steps[steps.index(start) % 2 :: 2]}
    index = [entry for entry in index if entry[0] in blocks]
    return {"start": [start, -place], "steps": list(blocks), "index": _packed(index), "blocks": blocks}


def step_credit(run: RunData, groups: Sequence[GroupRecord]) -> Tree:
    """Returns what the page shows of a step. A rollout's columns are its log-probs by view, then each method's values.

    The run's own method has the recorded values. Other methods are left out if they read what the trace lacks: a
    critic, a greedy response, the whole vocabulary, or a view that was not recorded.
    """
    batch, own = _token_batch(groups), run.estimator
    signals = {name: _signal_columns(method, batch, groups) for name, method in _comparable(run, groups)}
    signals = {own: signals.get(own, {})} | signals
    rollouts = [(place, rollout) for place, group in enumerate(groups) for rollout in group.rollouts]
    shown: list[Tree] = []
    for row, (place, rollout) in enumerate(rollouts):
        recorded = {_ADVANTAGE: rollout.token_advantages, "delta": rollout.delta, "weight": rollout.weight}
        columns: list[Fields] = [rollout.log_probs]
        for name, values in signals.items():
            computed = {key: value[row, : len(rollout.tokens)] for key, value in values.items()}
            columns.append(
                computed | ({key: value for key, value in recorded.items() if value is not None} if name == own else {})
            )
        fields = ("tokens", "reward", "accuracy", "finished", "is_scored", "references")
        numbers = [
            {
                key: [*map(finite_or_none, numpy.asarray(values, numpy.float64).round(6))]
                for key, values in part.items()
                if values is not None
            }
            for part in columns
        ]
        shown.append({"group": place, "columns": numbers} | {field: getattr(rollout, field) for field in fields})
    return {
        "step": groups[0].step,
        "methods": list(signals),
        "shown": [name for name, values in signals.items() if "delta" in values or name in (own, DEFAULT_ESTIMATOR)],
        "groups": [_group_header(group) for group in groups],
        "rollouts": shown,
    }


def _token_batch(groups: Sequence[GroupRecord]) -> TokenBatch:
    import torch

    rollouts = [rollout for group in groups for rollout in group.rollouts]
    longest = max(len(rollout.tokens) for rollout in rollouts)

    def padded(rows: Sequence[Sequence[float]]) -> Tensor:
        return torch.tensor([[*row, *[0.0] * (longest - len(row))] for row in rows])

    student = [rollout.log_probs.get(STUDENT) or [0.0] * len(rollout.tokens) for rollout in rollouts]
    views = [view for view in rollouts[0].log_probs if view != STUDENT]
    return TokenBatch(
        token_level_rewards=padded([[0.0] * (len(rollout.tokens) - 1) + [rollout.reward] for rollout in rollouts]),
        response_mask=padded([[1.0] * len(rollout.tokens) for rollout in rollouts]).bool(),
        old_log_probs=padded(student),
        group_ids=torch.tensor([place for place, group in enumerate(groups) for _ in group.rollouts]),
        teacher_log_probs={
            view: padded([rollout.log_probs[view] or own for rollout, own in zip(rollouts, student, strict=True)])
            for view in views
        },
        correct=torch.tensor([rollout.right for rollout in rollouts]),
        has_reference={
            view: torch.tensor([rollout.references.get(view) is not None for rollout in rollouts]) for view in views
        },
    )


def _comparable(run: RunData, groups: Sequence[GroupRecord]) -> Iterator[tuple[str, Estimator]]:
    """Yields the registered methods that can be computed from the trace."""
    recorded = set(groups[0].rollouts[0].log_probs)
    is_compared = min(len(group.rollouts) for group in groups) > 1
    for name in available_estimators():
        method = build_estimator(name, section_of(name, run.setting("algorithm", {})))
        reads_more = method.needs_values or method.needs_baseline or method.distilled_view is not None
        if not reads_more and set(method.views) <= recorded and (is_compared or not method.needs_group):
            yield name, method


def _signal_columns(method: Estimator, batch: TokenBatch, groups: Sequence[GroupRecord]) -> dict[str, numpy.ndarray]:
    """Returns a method's columns (B, T): its advantages and diagnostics."""
    signal = method.signal(batch, step=groups[0].step - 1)
    found = {_ADVANTAGE: signal.advantages, **signal.diagnostics}
    if "delta" in found and "value" not in found and min(len(group.rollouts) for group in groups) > 1:
        prior, _ = credit.pass_rate_of_others(batch.correct.float(), batch.group_ids)
        found["value"] = credit.evidence_values(prior, found["delta"])
    return {key: value.float().numpy() for key, value in found.items()}


def _clarity(rollout: RolloutRecord) -> float:
    """Returns how clearly evidence picks out a few tokens: the three largest shifts less half of the others; -1e9 without."""
    values = [weight - 1 for weight in rollout.weight] if rollout.weight else rollout.delta or [0.0]
    shifts = numpy.sort(numpy.nan_to_num(numpy.abs(values)))
    return float(shifts[-3:].sum() - shifts[:-3].sum() / 2) if shifts[-1] > 0 else -1e9


def _group_header(group: GroupRecord) -> Tree:
    fields = {name: getattr(group, name) for name in ("prompt_id", "problem", "ground_truth")}
    right = sum(rollout.right for rollout in group.rollouts)
    return {**fields, "right": right, "size": len(group.rollouts), "images": [_data_uri(png) for png in group.images]}


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
    return base64.b64encode(gzip.compress(json.dumps(content).encode(), compresslevel=6, mtime=0)).decode()
