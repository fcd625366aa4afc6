"""Computes the bytes that a rank sends to other ranks by arithmetic over the weights' shapes, and counts them.

A ring algorithm is assumed: an all-gather of shards of b bytes sends `(ranks - 1) b`, a reduce-scatter of B bytes
`(ranks - 1) / ranks B`. The short messages that synchronise ranks are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from cepo.workers.actor import Actor

SCORING, UPDATE, SYNCHRONISATION = "scoring passes", "update passes", "weights to the generators"


@dataclass(frozen=True, kw_only=True)
class WeightBytes:
    """Bytes of whole weights with the padding of their shards: all are gathered, and trained ones reduced."""

    gathered: int
    reduced: int


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The bytes of the sharded blocks, of the weights outside them, and of those sent to the generators."""

    blocks: WeightBytes
    outside: WeightBytes
    synchronised: int


@dataclass(kw_only=True)
class Calls:
    """Numbers of forward passes, optimizer steps and calls of scoring methods.

    A scoring call gathers the weights outside the blocks once.
    """

    scoring_calls: int = 0
    scoring_passes: int = 0
    update_passes: int = 0
    optimizer_steps: int = 0
    synchronisations: int = 0


def expected_bytes(sharding: Sharding, calls: Calls, ranks: int) -> dict[str, int]:
    """Returns the bytes that a rank sends, by purpose, if blocks are gathered in the forward and the backward pass."""

    def sent(whole: int) -> int:
        return whole * (ranks - 1) // ranks

    blocks, outside = sharding.blocks, sharding.outside
    of_a_pass = 2 * blocks.gathered + outside.gathered + blocks.reduced + outside.reduced
    return {
        SCORING: sent(calls.scoring_passes * blocks.gathered + calls.scoring_calls * outside.gathered),
        UPDATE: sent(calls.update_passes * of_a_pass),
        SYNCHRONISATION: sent(calls.synchronisations * sharding.synchronised),
    }


def sharding_of(actor: Actor, ranks: int, *, value_bytes: int = 4) -> Sharding:
    """Derives the sharding from the shapes of the actor's weights, with `value_bytes` per value for all purposes."""
    from torch.distributed.fsdp import FSDPModule

    blocks = [each for each in actor.module.modules() if isinstance(each, FSDPModule) and each is not actor.module]
    in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    sharded = [parameter for parameter in actor.module.parameters() if hasattr(parameter, "placements")]
    sizes: Counter[str] = Counter()
    for parameter in sharded:
        size = value_bytes * padded_size(parameter, ranks)
        place = "blocks" if id(parameter) in in_blocks else "outside"
        sizes[f"{place} gathered"] += size
        sizes[f"{place} reduced"] += size * parameter.requires_grad
    # Only the adapter, or all weights by name; a tied head has two names.
    synchronised = [each for each in sharded if each.requires_grad]
    if not hasattr(actor.module.model, "peft_config"):
        synchronised = [each for each in actor.module.state_dict().values() if hasattr(each, "placements")]
    return Sharding(
        blocks=WeightBytes(gathered=sizes["blocks gathered"], reduced=sizes["blocks reduced"]),
        outside=WeightBytes(gathered=sizes["outside gathered"], reduced=sizes["outside reduced"]),
        synchronised=sum(value_bytes * padded_size(each, ranks) for each in synchronised),
    )


def padded_size(parameter: Tensor, ranks: int) -> int:
    """Returns the number of elements with the first axis padded to a multiple of the ranks."""
    rows = parameter.shape[0]
    return parameter.numel() // rows * -(-rows // ranks) * ranks


@dataclass
class Count:
    """The bytes sent, by purpose, and the numbers of calls."""

    calls: Calls = field(default_factory=Calls)
    sent: Counter[str] = field(default_factory=Counter)

    def drain(self) -> dict[str, Any]:
        """Returns the counts since the last call and resets them."""
        found = {
            "calls": asdict(self.calls),
            "sent": {key: self.sent[key] for key in (SCORING, UPDATE, SYNCHRONISATION)},
        }
        self.calls, self.sent = Calls(), Counter()
        return found


def install(count: Count) -> None:
    """Makes `count` count what this process sends and calls from now on."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    from cepo.workers import distributed
    from cepo.workers.actor import Actor
    from cepo.workers.scoring_model import ScoringModel

    stage = [SCORING]

    def replace(owner: Any, name: str, before: Callable[..., None]) -> None:
        plain = getattr(owner, name)

        def counting(*arguments: Any, **keywords: Any) -> Any:
            before(*arguments, **keywords)
            return plain(*arguments, **keywords)

        setattr(owner, name, counting)

    def gather(_: Any, output_tensor: Any, input_tensor: Any, group: Any, *__: Any, **___: Any) -> None:
        count.sent[stage[0]] += input_tensor.nbytes * (group.size() - 1)

    def scatter(_: Any, output_tensor: Any, input_tensor: Any, group: Any, *__: Any, **___: Any) -> None:
        count.sent[stage[0]] += input_tensor.nbytes // group.size() * (group.size() - 1)

    def whole(tensor: Any) -> None:
        if hasattr(tensor, "to_local"):
            # A shard is padded to the size of the largest one before it is sent.
            ranks = dist.get_world_size()
            shard_bytes = padded_size(tensor, ranks) // ranks * tensor.element_size()
            count.sent[SYNCHRONISATION] += shard_bytes * (ranks - 1)

    def forward(*_: Any, **__: Any) -> None:
        if torch.is_grad_enabled():
            count.calls.update_passes += 1
        else:
            count.calls.scoring_passes += 1

    def scoring(*_: Any, **__: Any) -> None:
        stage[0] = SCORING
        count.calls.scoring_calls += 1

    def updating(*_: Any, **__: Any) -> None:
        stage[0] = UPDATE
        count.calls.optimizer_steps += 1

    def synchronising(*_: Any, **__: Any) -> None:
        count.calls.synchronisations += 1

    replace(collectives.DefaultAllGather, "__call__", gather)
    replace(collectives.DefaultReduceScatter, "__call__", scatter)
    replace(distributed, "whole_tensor", whole)
    replace(ScoringModel, "forward", forward)
    replace(Actor, "score", scoring)
    replace(Actor, "_optimizer_step", updating)
    replace(Actor, "rollout_weights", synchronising)
