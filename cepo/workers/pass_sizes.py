"""Chooses how many rows a pass has, and whether its blocks are computed again backwards, from a GPU's free memory.

Settings with a number stay as they are. Those that are left to `auto` are chosen once, before a model loads, and are the
same on all ranks: the smallest choice of any. A checkpoint keeps them, so that a resumed run makes the same passes.
Without a GPU, `auto` means the numbers of `WITHOUT_CARD`.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cepo.config import RunConfig
from cepo.config.worker_schema import ActorConfig, CriticConfig, ModelConfig, RolloutConfig
from cepo.sections.fields import Count, Natural
from cepo.workers.memory import (
    RESERVED_PER_ALLOCATED,
    Memory,
    TokenBytes,
    bound_in_passes,
    engine_in_passes,
    estimate_memory,
    gib,
    read_shape,
    token_bytes,
)

logger = logging.getLogger(__name__)

UPDATE_TOKENS = 32_768
"""Most tokens of a chosen update pass. An H200 computed 36,800 a second in passes of 11,500 and 40,200 in passes of 15,700."""
SCORING_TOKENS = 65_536
"""Most tokens of a chosen scoring pass."""
TOKENS_WITHOUT_RECOMPUTATION = 8_000
"""Fewest tokens of a pass for which keeping all activations is worth its memory."""


class PassSizes(NamedTuple):
    """How a model's passes are made: rows of the greatest length, and whether an update recomputes its blocks backwards."""

    update_rows: Count
    scoring_rows: Count
    recomputes: bool
    card: Natural = 0  # bytes of the smallest GPU whose memory decided; 0 if none did


WITHOUT_CARD = PassSizes(update_rows=4, scoring_rows=16, recomputes=True)


class PassNeeds(NamedTuple):
    """The bytes that a model needs in passes: `base` with one row, weights included, and for each further token."""

    base: int
    of_token: TokenBytes
    tokens: int  # of a row of the greatest length


def sizes_of(config: ActorConfig | CriticConfig, chosen: PassSizes = WITHOUT_CARD) -> PassSizes:
    """Returns the numbers of the settings, and `chosen` where they leave it open."""
    recomputes = config.model.enable_gradient_checkpointing
    return PassSizes(
        update_rows=config.micro_batch_size_per_device_for_update or chosen.update_rows,
        scoring_rows=config.micro_batch_size_per_device_for_experience or chosen.scoring_rows,
        recomputes=chosen.recomputes if recomputes == "auto" else recomputes,
        card=chosen.card,
    )


def with_numbers(config: RunConfig, sizes: PassSizes = WITHOUT_CARD) -> RunConfig:
    """Returns the configuration with `sizes` where the passes of actor and critic are left open."""

    def numbered(settings: Any) -> Any:
        pass_sizes = sizes_of(settings, sizes)
        return dataclasses.replace(
            settings,
            micro_batch_size_per_device_for_update=pass_sizes.update_rows,
            micro_batch_size_per_device_for_experience=pass_sizes.scoring_rows,
            model=dataclasses.replace(settings.model, enable_gradient_checkpointing=pass_sizes.recomputes),
        )

    worker = config.worker
    worker = dataclasses.replace(worker, actor=numbered(worker.actor), critic=numbered(worker.critic))
    return dataclasses.replace(config, worker=worker)


def needs_of(config: RunConfig, settings: ActorConfig | CriticConfig, *, with_vllm: bool) -> PassNeeds:
    """Returns what the passes of the actor or of the critic need, by `settings`, its part of `config`."""
    smallest = with_numbers(config, PassSizes(update_rows=1, scoring_rows=1, recomputes=True))
    memory = estimate_memory(smallest, with_vllm=with_vllm)
    shape = read_shape(settings.model)
    of_token = token_bytes(settings, shape)
    teacher_path = config.estimator.teacher.model_path
    if teacher_path is not None and isinstance(settings, ActorConfig):
        # Policy and teacher score in passes of the same sizes.
        teacher_shape = read_shape(ModelConfig(model_path=teacher_path))
        of_teacher = token_bytes(settings, teacher_shape)
        scored = max(of_token.scored, of_teacher.scored)
        of_token = of_token._replace(scored=scored)
    return PassNeeds(bound_in_passes(memory), of_token, tokens=config.data.longest_row)


def choose(needs: PassNeeds, *, free: int, card: int) -> PassSizes:
    """Returns the passes that fit into `free` of a GPU's `card` bytes beside nothing else, of one row at least.

    All activations are kept if passes of `TOKENS_WITHOUT_RECOMPUTATION` tokens fit so.
    """
    room = max(0, free - needs.base) / RESERVED_PER_ALLOCATED

    def fitting(bytes_of_token: int, most_tokens: int) -> int:
        return max(1, min(int(room // (bytes_of_token * needs.tokens)), most_tokens // needs.tokens))

    of_token = needs.of_token
    kept_rows = fitting(of_token.kept, UPDATE_TOKENS)
    kept_tokens = kept_rows * needs.tokens
    keeps = kept_tokens >= TOKENS_WITHOUT_RECOMPUTATION and kept_tokens * of_token.kept <= room
    return PassSizes(
        update_rows=kept_rows if keeps else fitting(of_token.recomputed, UPDATE_TOKENS),
        scoring_rows=fitting(of_token.scored, SCORING_TOKENS),
        recomputes=not keeps,
        card=card,
    )


def chosen_for(
    needs: PassNeeds, memory: Memory, rollout: RolloutConfig, device: torch.device, *, name: str
) -> PassSizes:
    """Returns and logs the passes of the model `name` on this process's GPU before anything is loaded."""
    free, card = torch.cuda.mem_get_info(device)
    free_for_passes = free - engine_in_passes(memory, rollout, free=free, total=card)
    sizes = choose(needs, free=free_for_passes, card=card)
    logger.info("%s: %s, from %s free of %s", name, in_words(sizes, needs.tokens), gib(free_for_passes), gib(card))
    return sizes


def in_words(sizes: PassSizes, tokens: int) -> str:
    how = "with recomputation" if sizes.recomputes else "without recomputation"
    return f"updates in passes of {sizes.update_rows * tokens} tokens {how}, scoring of {sizes.scoring_rows * tokens}"


def agreed(sizes: PassSizes, device: torch.device) -> PassSizes:
    """Returns the smallest choice of all ranks; collective."""
    values = [sizes.update_rows, sizes.scoring_rows, -int(sizes.recomputes), sizes.card]
    tensor = torch.tensor(values, dtype=torch.long, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    update_rows, scoring_rows, keeps, card = tensor.tolist()
    return PassSizes(update_rows, scoring_rows, recomputes=keeps < 0, card=card)


def resumed(recorded: PassSizes, chosen: PassSizes) -> PassSizes:
    """Returns the passes of a resumed run: the recorded ones unless this run's GPU is smaller, or none decides."""
    if chosen.card == 0 or recorded.card == 0:
        return chosen
    if chosen.card < recorded.card:
        logger.warning(
            "passes differ from the checkpoint's, since this GPU has %s instead of %s: results differ by rounding",
            gib(chosen.card), gib(recorded.card),
        )  # fmt: skip
        return chosen
    return recorded
