"""What a rank does to find whether rows stay packed in bf16, where one rank has no row and where one rank packs wrongly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rank_scenarios import Scenario, Share, build_actor

from cepo.workers import passes
from cepo.workers.passes import collate_packed
from cepo.workers.scoring_model import CollatedRows

RIGHT, WRONG = "packed as it should be", "packed one token too early by the last rank"


def check_runs(folder: Path) -> dict[str, bool]:
    """Whether this rank's rows are packed after the check."""
    return {name: _still_packed(folder, wrong=name == WRONG) for name in (RIGHT, WRONG)}


def _still_packed(folder: Path, *, wrong: bool) -> bool:
    actor, processing = build_actor(folder, Scenario(settings={"fsdp.mp_param_dtype": "bf16"}))
    share = Share(processing, "one empty")

    def one_token_early(rows: Any, **settings: Any) -> CollatedRows:
        batch = collate_packed(rows, **settings)
        return replace(batch, response_index=batch.response_index - 1)

    faulty = wrong and dist.get_rank() == dist.get_world_size() - 1
    passes.collate_packed = one_token_early if faulty else collate_packed
    try:
        actor.score(share.rows)
    finally:
        passes.collate_packed = collate_packed
    return actor.passes.packed
