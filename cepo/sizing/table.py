"""Builds the table of `cepo doctor table=memory`: which GPUs can train which models in the paper's setting."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from cepo.config import RunConfig, load_config
from cepo.config.schema import LoraConfig
from cepo.models.families.qwen3_vl import PUBLISHED_SIZES, published_config
from cepo.sizing.fitting import phases_on, settings_that_fit
from cepo.sizing.memory import ModelShape
from cepo.sizing.needs import Needs, ShapeOf, estimate_needs
from cepo.sizing.shape import shape_of

CARDS = (24, 48, 80, 96, 141, 180)
"""Memory of the cards, in GB of 10^9 bytes."""
RESPONSES = (2048, 4096, 8192)
_SETTING = "config=configs/geo3k/cepo.yaml"
_LORA = "worker.actor.model.lora"
_TRAINED = {
    "LoRA": [f"{_LORA}.rank=16"],
    "QLoRA": [f"{_LORA}.rank=16", f"{_LORA}.quantization=nf4"],
    "all weights": [f"{_LORA}.rank=0"],
}
_TAKEN_BY_THE_DRIVER = 500_000_000
_SCORED_PER_TRAINED = 4  # rows of a scoring pass per row of an update, as in the defaults
_MOST_ROWS = 64
_SHARE = "worker.rollout.gpu_memory_utilization="
NeedsByRows = Callable[[int], Needs]


@cache
def known_shape(size: str, lora: LoraConfig) -> ModelShape:
    """Returns the shape of Qwen3-VL-`size` with this adapter."""
    return shape_of(published_config(size), lora=lora)


def shapes_of(size: str) -> ShapeOf:
    """Returns a `shape_of_path` for `estimate_needs` that gives every model the shape of Qwen3-VL-`size`."""

    def shape_of_path(path: str, trust: bool, override: Mapping[str, Any], lora: LoraConfig) -> ModelShape:
        return known_shape(size, lora)

    return shape_of_path


def memory_table() -> list[str]:
    """Returns the table as lines of Markdown."""
    lines = [
        f"| model | trained | longest response | {' | '.join(f'{card} GB' for card in CARDS)} |",
        f"| --- | --- | --- |{' --- |' * len(CARDS)}",
    ]
    for size in PUBLISHED_SIZES:
        for trained, settings in _TRAINED.items():
            for response in RESPONSES:
                config = load_config([_SETTING, f"data.max_response_length={response}", *settings])
                needs = _needs_by_rows(config, shapes_of(size))
                cells = [cell(config, shapes_of(size), needs, card) for card in CARDS]
                lines.append(f"| {size} | {trained} | {response} | {' | '.join(cells)} |")
    return lines


def cell(config: RunConfig, shapes: ShapeOf, needs: NeedsByRows, gigabytes: float) -> str:
    """Returns whether and how a configuration fits on a card.

    - `fits N`: vLLM keeps its memory with the default micro-batches, and an update pass takes up to N rows.
    - `sleeps N`: vLLM frees its memory between the phases, and N is the largest micro-batch then.
    - `refused`: no share of vLLM fits.

    If the default share of 0.6 is refused, another one precedes the first two.
    """
    total = int(gigabytes * 1e9)
    free = total - _TAKEN_BY_THE_DRIVER
    found = _verdict(config, needs, free, total)
    if found is not None:
        return found
    smallest = _with_rows(config, 1)
    written = settings_that_fit(smallest, free=free, total=total, with_vllm=True, shape_of_path=shapes)
    if not written.startswith(_SHARE) or " " in written:
        return "refused"
    share = float(written.removeprefix(_SHARE))
    with_share = _with_share(config, share)
    shared = _verdict(with_share, _needs_by_rows(with_share, shapes), free, total)
    assert shared is not None, "one row per pass was found to fit"
    return f"{share:g}: {shared}"


def _needs_by_rows(config: RunConfig, shapes: ShapeOf) -> NeedsByRows:
    """Returns a function from the rows of an update pass to the run's needs, which are computed once for all cards."""
    return cache(lambda rows: estimate_needs(_with_rows(config, rows), cpu_engine=False, shape_of_path=shapes))


def _verdict(config: RunConfig, needs: NeedsByRows, free: int, total: int) -> str | None:
    """Returns None if not even one row per pass fits."""

    def words(rows: int) -> str:
        return phases_on(config, needs(rows), free=free, total=total, with_vllm=True).in_words

    usual = words(config.worker.actor.micro_batch_size_per_device_for_update)
    wanted = usual if usual == "fits" else "sleeps"
    accepted = {wanted, "fits"}
    largest = next((rows for rows in range(_MOST_ROWS, 0, -1) if words(rows) in accepted), 0)
    return f"{wanted} {largest}" if largest else None


def _with_rows(config: RunConfig, rows: int) -> RunConfig:
    actor = dataclasses.replace(
        config.worker.actor,
        micro_batch_size_per_device_for_update=rows,
        micro_batch_size_per_device_for_experience=_SCORED_PER_TRAINED * rows,
    )
    return dataclasses.replace(config, worker=dataclasses.replace(config.worker, actor=actor))


def _with_share(config: RunConfig, share: float) -> RunConfig:
    rollout = dataclasses.replace(config.worker.rollout, gpu_memory_utilization=share)
    return dataclasses.replace(config, worker=dataclasses.replace(config.worker, rollout=rollout))
