"""Some of a step's groups as they are written to `rollouts.jsonl`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cepo.models.processing import Processing
from cepo.tracking.run_folder import GroupRecord, RolloutRecord, png_bytes
from cepo.trainer.rollouts import RolloutBatch


def group_records(batch: RolloutBatch, processing: Processing, num_groups: int) -> list[GroupRecord]:
    """The first `num_groups` groups, those with right and wrong rollouts before the others."""
    size = batch.group_size
    mixed = [0 < int(batch.correct[n * size : (n + 1) * size].sum()) < size for n in range(len(batch.problems))]
    chosen = sorted(range(len(batch.problems)), key=lambda number: (not mixed[number], number))[:num_groups]
    return [_group_record(batch, processing, number) for number in chosen]


def _group_record(batch: RolloutBatch, processing: Processing, number: int) -> GroupRecord:
    problem, rows = batch.problems[number], _rows(batch, number)
    own = [view for view, texts in batch.references.items() if len({texts[row] for row in rows}) > 1]
    shown = (*problem.images, *(video.first_frame() for video in problem.videos))
    return GroupRecord(
        step=batch.step + 1,
        prompt_id=problem.prompt_id,
        problem=problem.text,
        ground_truth=problem.ground_truth,
        image=png_bytes(shown[0]) if shown else None,
        references={view: None if view in own else texts[rows[0]] for view, texts in batch.references.items()},
        rollouts=[_rollout_record(batch, processing, row, own) for row in rows],
    )


def _rollout_record(batch: RolloutBatch, processing: Processing, row: int, own: Sequence[str]) -> RolloutRecord:
    assert batch.signal is not None, "records are written after the estimate"
    tokens = batch.generations[row].response_ids
    diagnostics = batch.signal.diagnostics
    advantages = batch.signal.advantages[row, : len(tokens)]
    weight = _values(diagnostics.get("weight"), row, len(tokens))
    return RolloutRecord(
        response=batch.responses[row],
        tokens=processing.token_texts(tokens),
        reward=float(batch.rewards[row]),
        accuracy=float(batch.correct[row]),
        advantage=float(advantages.mean()),
        token_advantages=advantages.tolist(),
        delta=_values(diagnostics.get("delta"), row, len(tokens)),
        weight=weight,
        references={view: batch.references[view][row] for view in own},
    )


def _values(tensor: Tensor | None, row: int, length: int) -> Sequence[float] | None:
    return None if tensor is None else tensor[row, :length].tolist()


def _rows(batch: RolloutBatch, number: int) -> range:
    return range(number * batch.group_size, (number + 1) * batch.group_size)
