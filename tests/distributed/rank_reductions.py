"""What a rank does to find how often gradients are reduced, and that waiting for the last pass changes no gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rank_scenarios import Outcome, Scenario, Share, build_actor, every_run, whole_gradients
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

from cepo.data.batch import OptimizerBatch
from cepo.workers.actor import Actor
from cepo.workers.passes import GradientReduction

MICRO_BATCH = 2
_SETTINGS = {
    "micro_batch_size_per_device_for_update": MICRO_BATCH,
    "padding_free": False,
    "optim.lr": "1e-3",
    "optim.lr_scheduler_type": "cosine",  # ends at 0, where an update changes no weight
}
FLOAT32, HALF, COPIES = "an adapter in float32", "an adapter in bfloat16", "an adapter, shards over 2 ranks with copies"
WEIGHTS = "all weights but the vision tower's"
SCENARIOS: Mapping[int, Mapping[str, Mapping[str, Any]]] = {
    1: {},
    2: {
        FLOAT32: {"model.lora.rank": 4},
        HALF: {"model.lora.rank": 4, "fsdp.mp_param_dtype": "bf16"},
        WEIGHTS: {"model.freeze_vision_tower": True},
    },
    4: {COPIES: {"model.lora.rank": 4, "fsdp.fsdp_size": 2}},
}
"""By number of ranks."""
_SHARES = {2: "mixed", 4: "one empty"}


@dataclass(kw_only=True)
class Reductions:
    """Of the same update: as the actor makes it, and with a reduction after every pass.

    Attributes:
        passes: of the update.
        groups: that FSDP reduces together.
        counted, counted_plain: reduce-scatters of the update.
        gradients, gradients_plain: whole ones.
        decisions: whether gradients would be reduced once, by what differs from the scenario.
    """

    passes: int
    groups: int
    counted: int
    counted_plain: int
    gradients: dict[str, Tensor]
    gradients_plain: dict[str, Tensor]
    decisions: dict[str, bool]


def every_run_and_reduction(folder: Path, saved: Path) -> tuple[dict[str, Outcome], dict[str, Reductions]]:
    """`every_run`, and in the same process group the scenarios of this module."""
    runs = every_run(folder, saved)
    mine = SCENARIOS[dist.get_world_size()]
    return runs, {name: reduction_run(folder, settings) for name, settings in mine.items()}


def reduction_run(folder: Path, settings: Mapping[str, Any]) -> Reductions:
    """Two ways to the gradient of one update, after a first one that makes both halves of an adapter differ from zero."""
    actor, processing = build_actor(folder, Scenario(settings={**_SETTINGS, **settings}))
    share = Share(processing, _SHARES[dist.get_world_size()])
    batch = OptimizerBatch(
        rows=share.rows,
        old_log_probs=share.signal(10, 0.1) - 6.0,
        advantages=share.signal(20),
        response_mask=share.mask,
        denominators=share.denominators,
    )
    actor.update([batch], step=0)
    counted, gradients = _update(actor, batch)
    once, actor.reduction.once = actor.reduction.once, False
    counted_plain, gradients_plain = _update(actor, batch)
    actor.reduction.once = once
    layers = {name.split(".layers.")[1].split(".")[0] for name in gradients if ".layers." in name}
    outside = any(".layers." not in name for name in gradients)
    return Reductions(
        passes=len(actor.passes.cut(share.rows, MICRO_BATCH)),
        groups=len(layers) + outside,
        counted=counted,
        counted_plain=counted_plain,
        gradients=gradients,
        gradients_plain=gradients_plain,
        decisions=_decisions(actor),
    )


def _update(actor: Actor, batch: OptimizerBatch) -> tuple[int, dict[str, Tensor]]:
    """Reduce-scatters and gradients of an update at learning rate 0."""
    with _reduce_scatters() as counted:
        metrics = actor.update([batch], step=10)
    if dist.get_rank() == 0:
        assert metrics["actor/lr"].result == 0
    return len(counted), whole_gradients(actor)


@contextmanager
def _reduce_scatters() -> Iterator[list[int]]:
    """Bytes of each reduce-scatter of this process."""
    kind: Any = collectives.DefaultReduceScatter
    plain, found = kind.__call__, []

    def counting(self: Any, output_tensor: Any, input_tensor: Any, *arguments: Any, **keywords: Any) -> Any:
        found.append(input_tensor.nbytes)
        return plain(self, output_tensor, input_tensor, *arguments, **keywords)

    kind.__call__ = counting
    try:
        yield found
    finally:
        kind.__call__ = plain


def _decisions(actor: Actor) -> dict[str, bool]:
    fsdp = actor._config.fsdp
    return {
        name: GradientReduction(actor.module, settings, has_adapter=has_adapter, same_blocks=same_blocks).once
        for name, settings, has_adapter, same_blocks in (
            ("an adapter", fsdp, True, True),
            ("all weights", fsdp, False, True),
            ("an adapter on the vision tower too", fsdp, True, False),
            ("reduced in bfloat16", replace(fsdp, mp_reduce_dtype="bf16"), True, True),
        )
    }
