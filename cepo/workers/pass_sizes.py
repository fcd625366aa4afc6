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
from cepo.config.worker_schema import ActorConfig, CriticConfig, RolloutConfig
from cepo.models import pretrained
from cepo.sections.fields import Count, Natural
from cepo.workers.memory import (
    ASLEEP_BYTES,
    RESERVED_PER_ALLOCATED,
    VALUE_BYTES,
    Memory,
    bound_in_passes,
    estimate_memory,
    gib,
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


class RowBytes(NamedTuple):
    """The bytes that a model needs in passes: `base` with one row, weights included, and by each row of the greatest length."""

    base: int
    kept: int  # in an update that keeps all activations
    recomputed: int  # in an update that keeps the inputs of blocks
    scored: int
    tokens: int  # of the row


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
        found = sizes_of(settings, sizes)
        return dataclasses.replace(
            settings,
            micro_batch_size_per_device_for_update=found.update_rows,
            micro_batch_size_per_device_for_experience=found.scoring_rows,
            model=dataclasses.replace(settings.model, enable_gradient_checkpointing=found.recomputes),
        )

    worker = config.worker
    worker = dataclasses.replace(worker, actor=numbered(worker.actor), critic=numbered(worker.critic))
    return dataclasses.replace(config, worker=worker)


def needs_of(config: RunConfig, settings: ActorConfig | CriticConfig, *, with_vllm: bool) -> RowBytes:
    """Returns what the passes of the actor or of the critic need, by `settings`, its part of `config`."""
    smallest = with_numbers(config, PassSizes(update_rows=1, scoring_rows=1, recomputes=True))
    assert settings.model.model_path is not None, "the critic's settings come resolved"
    model = pretrained.read_config(settings.model.model_path, trust_remote_code=settings.model.trust_remote_code)
    for name, value in settings.model.override_config.items():
        setattr(model, name, value)
    needs = row_bytes(
        model.get_text_config(),
        settings,
        base=bound_in_passes(estimate_memory(smallest, with_vllm=with_vllm)),
        tokens=config.data.max_prompt_length + config.data.max_response_length,
        trains_tower=trains_tower(settings) and hasattr(model, "vision_config"),
    )
    teacher_path = config.estimator.teacher.model_path
    if teacher_path is None or isinstance(settings, CriticConfig):
        return needs
    teacher = pretrained.read_config(teacher_path, trust_remote_code=False).get_text_config()
    of_teacher = row_bytes(teacher, settings, base=needs.base, tokens=needs.tokens)
    return needs._replace(scored=max(needs.scored, of_teacher.scored))  # both score in passes of the same sizes


def trains_tower(settings: ActorConfig | CriticConfig) -> bool:
    if settings.model.freeze_vision_tower:
        return False
    if isinstance(settings, CriticConfig):
        return True
    lora = settings.model.lora
    return lora.rank == 0 or lora.exclude_modules is None


def row_bytes(
    text: Any, settings: ActorConfig | CriticConfig, *, base: int, tokens: int, trains_tower: bool = False
) -> RowBytes:
    """Returns the bytes of a row of `tokens` tokens, by the configuration `text` of a language model of equal layers.

    Per token, with b bytes a value, H hidden and I inner values and L layers, a layer keeps

        k = b (10 H + 3 I)            compiled: counted 7 H + 3 I of a Qwen3 layer, where keys are half as wide
        k = b (14 H + 4 I) + 32 H     as it is, with norms in float32

    and a pass keeps `L k`, or with recomputation `L b H`, beside one layer as it is. A pass without gradient holds half of
    that. A trained vision tower counts as much as the language model.
    """
    value_bytes = VALUE_BYTES[settings.fsdp.mp_param_dtype]
    inner = text.intermediate_size
    if not isinstance(inner, int):  # Gemma 3n lists that of each layer
        inner = max(inner)
    hidden = text.hidden_size
    depth = text.num_hidden_layers
    as_it_is = value_bytes * (14 * hidden + 4 * inner) + 32 * hidden
    compiles = settings.model.compile_layers is not False
    if "linear_attention" in (getattr(text, "layer_types", None) or ()):
        compiles = False  # see `compile_decoder`
    of_layer = value_bytes * (10 * hidden + 3 * inner) if compiles else as_it_is
    row = tokens * (2 if trains_tower else 1)
    return RowBytes(
        base=base,
        kept=row * (depth * of_layer + as_it_is),
        recomputed=row * (depth * value_bytes * hidden + as_it_is),
        scored=row * as_it_is // 2,
        tokens=tokens,
    )


def choose(needs: RowBytes, *, free: int, card: int) -> PassSizes:
    """Returns the passes that fit into `free` of a GPU's `card` bytes beside nothing else, of one row at least.

    All activations are kept if passes of `TOKENS_WITHOUT_RECOMPUTATION` tokens fit so.
    """
    room = max(0, free - needs.base) / RESERVED_PER_ALLOCATED

    def fitting(bytes_of_row: int, most_tokens: int) -> int:
        return max(1, min(int(room // bytes_of_row), most_tokens // needs.tokens))

    kept_rows = fitting(needs.kept, UPDATE_TOKENS)
    keeps = kept_rows * needs.tokens >= TOKENS_WITHOUT_RECOMPUTATION and kept_rows * needs.kept <= room
    return PassSizes(
        update_rows=kept_rows if keeps else fitting(needs.recomputed, UPDATE_TOKENS),
        scoring_rows=fitting(needs.scored, SCORING_TOKENS),
        recomputes=not keeps,
        card=card,
    )


def free_beside_engine(memory: Memory, rollout: RolloutConfig, *, free: int, card: int) -> int:
    """Returns what the rollout engine leaves of `free` bytes in passes; whether it sleeps is decided (`sleep`)."""
    if not memory.with_vllm:
        return free - memory.engine
    return free - (ASLEEP_BYTES if rollout.sleep else int(rollout.gpu_memory_utilization * card))


def chosen_for(
    needs: RowBytes, memory: Memory, rollout: RolloutConfig, device: torch.device, *, name: str
) -> PassSizes:
    """Returns and logs the passes of the model `name` on this process's GPU before anything is loaded."""
    free, card = torch.cuda.mem_get_info(device)
    left = free_beside_engine(memory, rollout, free=free, card=card)
    sizes = choose(needs, free=left, card=card)
    logger.info("%s: %s, from %s free of %s", name, in_words(sizes, needs.tokens), gib(left), gib(card))
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
