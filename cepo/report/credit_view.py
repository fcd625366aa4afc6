"""Computes the credit of every recorded token under every method that the trace allows, for the page's credit view.

The methods' own code runs here, on the log-probs of the trace; the page only shows the results. Each step is one
compressed block: a JSON header and float32 arrays, so that the page has exactly the values of the trace.
"""

from __future__ import annotations

import base64
import gzip
import io
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from cepo.algorithms import Estimator, available_estimators, build_estimator, credit, section_of
from cepo.algorithms.settings import DEFAULT_ESTIMATOR
from cepo.foreign_files import damaged_as, open_image, require_within
from cepo.report.recorded_run import RunData
from cepo.tracking.run_folder import write_atomically
from cepo.tracking.trace import STUDENT, GroupRecord, RolloutRecord, read_rollouts
from cepo.types import TokenBatch

if TYPE_CHECKING:
    from torch import Tensor

_INLINE_BYTES = 15_000_000
"""If the blocks exceed this size together, they are files next to the page, which loads a step when it is viewed."""
_LARGEST_IMAGE = 640
_ADVANTAGE = "advantage"
_Columns = dict[str, numpy.ndarray]


def credit_view(run: RunData, page: Path) -> dict[str, Any] | None:
    """Returns the data of the page's credit view: an index of all rollouts and a block per step; None without a trace.

    Large blocks are written into a folder next to the page, and the view has their paths.
    """
    blocks: dict[int, str] = {}
    index: list[list[Any]] = []
    problems: dict[str, int] = {}
    start = (0, 0, -math.inf)
    for step, groups in itertools.groupby(read_rollouts(run.folder), key=lambda group: group.step):
        listed = list(groups)
        blocks[step] = _block(*step_credit(run, listed))
        rollouts = [(group, rollout) for group in listed for rollout in group.rollouts]
        for place, (group, rollout) in enumerate(rollouts):
            problem = problems.setdefault(f"{group.prompt_id}: {group.problem}", len(problems))
            index.append([step, place, problem, rollout.right, rollout.reward, rollout.response])
        clarity = [_clarity(rollout) for _, rollout in rollouts]
        if max(clarity) >= start[2]:
            start = (step, clarity.index(max(clarity)), max(clarity))
    if not blocks:
        return None
    is_split = sum(map(len, blocks.values())) > _INLINE_BYTES
    view: dict[str, Any] = {"start": {"step": start[0], "rollout": start[1]}, "steps": sorted(blocks)}
    view["index"] = _packed(json.dumps({"problems": list(problems), "rollouts": index}).encode())
    view["blocks"] = {step: block for step, block in blocks.items() if not is_split or step == start[0]}
    view["files"] = _written(page, blocks) if is_split else {}
    return view


def step_credit(run: RunData, groups: Sequence[GroupRecord]) -> tuple[dict[str, Any], list[list[_Columns]]]:
    """Returns a step's header, and the columns of each rollout: log-probs by view, then the values of each method.

    The run's own method has the recorded values. Other methods are left out if they read what the trace lacks: a
    critic, a greedy response, the whole vocabulary, or a view that was not recorded.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    batch = _token_batch(groups)
    comparable = list(_comparable(run, groups))
    names = [run.estimator, *(name for name in comparable if name != run.estimator)]
    columns: list[list[_Columns]] = [[_log_probs(rollout)] for rollout in rollouts]
    readers: list[str] = []
    for name in names:
        signals = _signal_columns(run, name, batch, groups) if name in comparable else {}
        readers += [name] if "delta" in signals or name in (run.estimator, DEFAULT_ESTIMATOR) else []
        for row, rollout in enumerate(rollouts):
            values = {key: value[row, : len(rollout.tokens)] for key, value in signals.items()}
            columns[row].append(values | (_recorded(rollout) if name == run.estimator else {}))
    header = {
        "step": groups[0].step,
        "methods": names,
        "shown": readers,
        "groups": [_group_header(group) for group in groups],
        "rollouts": [
            _rollout_header(place, rollout) for place, group in enumerate(groups) for rollout in group.rollouts
        ],
    }
    return header, columns


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


def _comparable(run: RunData, groups: Sequence[GroupRecord]) -> Iterator[str]:
    """Yields the registered methods that can be computed from the trace."""
    recorded = set(groups[0].rollouts[0].log_probs)
    is_compared = min(len(group.rollouts) for group in groups) > 1
    for name in available_estimators():
        kind = build_estimator(name, section_of(name, run.setting("algorithm", {})))
        reads_more = kind.needs_values or kind.needs_baseline or kind.distilled_view is not None
        if not reads_more and set(kind.views) <= recorded and (is_compared or not kind.needs_group):
            yield name


def _signal_columns(
    run: RunData, name: str, batch: TokenBatch, groups: Sequence[GroupRecord]
) -> dict[str, numpy.ndarray]:
    """Returns a method's columns (B, T): its advantages and diagnostics."""
    estimator: Estimator = build_estimator(name, section_of(name, run.setting("algorithm", {})))
    signal = estimator.signal(batch, step=groups[0].step - 1)
    found = {_ADVANTAGE: signal.advantages, **signal.diagnostics}
    if "delta" in found and "value" not in found and min(len(group.rollouts) for group in groups) > 1:
        prior, _ = credit.pass_rate_of_others(batch.correct.float(), batch.group_ids)
        found["value"] = credit.evidence_values(prior, found["delta"])
    return {key: value.float().numpy() for key, value in found.items()}


def _log_probs(rollout: RolloutRecord) -> _Columns:
    return {
        view: numpy.array(values, numpy.float32) for view, values in rollout.log_probs.items() if values is not None
    }


def _recorded(rollout: RolloutRecord) -> _Columns:
    values = {_ADVANTAGE: rollout.token_advantages, "delta": rollout.delta, "weight": rollout.weight}
    return {key: numpy.array(value, numpy.float32) for key, value in values.items() if value is not None}


def _clarity(rollout: RolloutRecord) -> float:
    """Returns how clearly the evidence picks out a few tokens: the three largest shifts less half of all others.

    It is -1e9 without evidence.
    """
    values = [weight - 1 for weight in rollout.weight] if rollout.weight else rollout.delta or [0.0]
    shifts = numpy.sort(numpy.nan_to_num(numpy.abs(values)))
    return float(shifts[-3:].sum() - shifts[:-3].sum() / 2) if shifts[-1] > 0 else -1e9


def _group_header(group: GroupRecord) -> dict[str, Any]:
    fields = {name: getattr(group, name) for name in ("prompt_id", "problem", "ground_truth")}
    right = sum(rollout.right for rollout in group.rollouts)
    return {**fields, "right": right, "size": len(group.rollouts), "images": [_data_uri(png) for png in group.images]}


def _rollout_header(group: int, rollout: RolloutRecord) -> dict[str, Any]:
    own = ("tokens", "reward", "accuracy", "finished", "is_scored", "references")
    return {"group": group, **{name: getattr(rollout, name) for name in own}}


def _data_uri(png: bytes) -> str:
    image = open_image(png, formats=("PNG", "JPEG"))
    if max(image.size) > _LARGEST_IMAGE:
        smaller = io.BytesIO()
        with damaged_as(Path("an image of the run"), "cannot be decoded"):
            image.thumbnail((_LARGEST_IMAGE, _LARGEST_IMAGE))
            image.save(smaller, format="WEBP", quality=80)
        return "data:image/webp;base64," + base64.b64encode(smaller.getvalue()).decode()
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _block(header: dict[str, Any], columns: Sequence[Sequence[_Columns]]) -> str:
    """Returns a step as text: gzip of the header's length, the header with constant arrays, and the other arrays."""
    arrays: list[numpy.ndarray] = []
    for rollout, parts in zip(header["rollouts"], columns, strict=True):
        rollout["columns"] = [{} for _ in parts]
        for shown, part in zip(rollout["columns"], parts, strict=True):
            for name, values in part.items():
                is_constant = values.size > 0 and bool((values == values[0]).all())
                shown[name] = float(values[0]) if is_constant else None
                arrays += [] if is_constant else [values]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 4)  # so that the arrays begin at a multiple of 4
    return _packed(len(text).to_bytes(4, "little") + text + b"".join(array.tobytes() for array in arrays))


def _packed(content: bytes) -> str:
    return base64.b64encode(gzip.compress(content, compresslevel=6, mtime=0)).decode()


def _written(page: Path, blocks: Mapping[int, str]) -> dict[int, str]:
    folder = page.with_name(f"{page.stem}_steps")
    folder.mkdir(parents=True, exist_ok=True)
    require_within(folder, page.parent)
    for step, block in blocks.items():
        write_atomically(folder / f"{step}.js", f'creditBlock({step}, "{block}");\n')
    return {step: f"{folder.name}/{step}.js" for step in blocks}
