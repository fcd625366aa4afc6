"""Where the tests of this folder run and on what: devices with their shapes, actors, rows, limits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import actors
import torch
from torch import Tensor

from cepo.data.batch import ScoringRow
from cepo.models.processing import Processing
from cepo.workers.actor import Actor
from testing.rows import build_rows, gradients_of, optimizer_batch
from testing.shapes import MICRO, QWEN3_VL_2B, SMALL, Shape, write_checkpoint

REPOSITORY = Path(__file__).resolve().parents[2]
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}

LOG_PROB_LIMITS = {"fp32": (1e-5, 1e-5, 1e-5), "bf16": (4e-2, 0.12, 0.3)}
"""Mean, 99th percentile and largest gap in nats between two ways to compute the same log-probs.

For bf16 they are twice the gaps of 2 billion random weights on an H100, 0.019, 0.061 and 0.10, which are those of the type's
rounding: the test of packed rows compares both ways with float32.
"""

GRADIENT_LIMITS = {"fp32": 1e-4, "bf16": 0.1}
"""Norm of the difference of two gradients by the norm of one."""


SAME_TRAINING = {"cpu": 0.0, "cuda": 0.3}
"""`distance` of two runs of the same updates. Kernels of a GPU may add in any order, and Adam makes a whole step of a gradient's
sign, however small the gradient."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A device and the sizes that tests have there: `whole` training runs, and `part`s, which build several actors."""

    device: str
    folder: Path = Path()
    """Where the checkpoints of random weights are kept for all tests."""
    whole: Shape
    part: Shape
    samples: int
    response: int
    """Most tokens of a sampled response."""
    min_pixels: int
    """To which pictures are enlarged; 1,024 pixels are a token."""
    memory_grid: tuple[tuple[int, int], tuple[int, int]]
    """Vocabularies and numbers of tokens of the memory test."""
    head_elements: int
    """Logits that the head may hold at once there, few enough that the grid has many chunks."""

    def checkpoint(self, shape: Shape, dtype: str = "bf16") -> Path:
        """A checkpoint folder of random weights, drawn on the device."""
        return write_checkpoint(shape, self.folder / f"{shape.name}-{dtype}", device=self.device, dtype=DTYPES[dtype])


CPU = Place(
    device="cpu",
    whole=MICRO,
    part=MICRO,
    samples=4,
    response=8,
    min_pixels=64 * 64,
    memory_grid=((4096, 8192), (512, 1024)),
    head_elements=2**17,
)
CUDA = Place(
    device="cuda",
    whole=QWEN3_VL_2B,
    part=SMALL,
    samples=8,
    response=128,
    min_pixels=512 * 512,
    memory_grid=((32_768, 151_936), (4096, 16_384)),
    head_elements=2**25,
)


def build_actor(folder: Path, *, dtype: str = "bf16", **settings: Any) -> Actor:
    """A policy with an adapter of rank 16 and gradient checkpointing."""
    usual: dict[str, Any] = {
        "model__lora__rank": 16,
        "model__lora__exclude_modules": ".*visual.*",
        "model__enable_gradient_checkpointing": "true",
        "fsdp__mp_param_dtype": dtype,
        "optim__lr": 1e-3,
        "max_grad_norm": 1e9,
    }
    return actors.build_actor(folder, **(usual | settings))


def draw_adapter(actor: Actor) -> None:
    """B of a fresh adapter is 0, which hides the gradient of A and makes the adapter invisible."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in actor.module.named_parameters():
            if "lora_B" in name:
                local: Any = getattr(weight, "_local_tensor", weight)
                local.copy_(0.02 * torch.randn(local.shape, generator=generator))


def rows_for(shape: Shape, folder: Path, *, groups: int = 2, contexts: int = 3) -> list[ScoringRow]:
    """Responses of skewed lengths behind each of the contexts of each group, in a shuffled order."""
    size = shape.group_size
    views = build_rows(
        shape, Processing(str(folder)), groups=groups, group_size=size, contexts=contexts, prompt=shape.prompt_tokens
    )
    rows = [row for view in views for row in view]
    random.Random(3).shuffle(rows)
    return rows


def gradient_of(actor: Actor, rows: list[ScoringRow]) -> Tensor:
    """The adapter's gradient as one vector on the CPU."""
    return torch.cat([gradient.flatten().double() for gradient in gradients_of(actor, optimizer_batch(rows))])


def weights_of(actor: Actor) -> dict[str, Tensor]:
    """Copies of the trained weights on the CPU."""
    return {name: weight.cpu() for name, weight in actors.parameters_of(actor).items()}


def gaps(left: Sequence[Tensor], right: Sequence[Tensor]) -> tuple[float, float, float]:
    """Mean, 99th percentile and largest of the differences of two lists of log-probs, in nats."""
    assert left, "nothing was compared"
    differences = (torch.cat(list(left)).double() - torch.cat(list(right)).double()).abs()
    return float(differences.mean()), float(differences.quantile(0.99)), float(differences.max())


def trained(actor: Actor, rows: list[ScoringRow], *, steps: int, first: int = 0) -> dict[str, Tensor]:
    """The adapter after updates on the rows, before each of which the actor rests as it does during sampling."""
    for step in range(first, first + steps):
        actor.rest()
        actor.score(rows)
        actor.update([optimizer_batch(rows)], step=step)
        actor.finish_step(step)
    return weights_of(actor)


def within(found: Sequence[float], limits: Sequence[float]) -> bool:
    return all(gap <= limit for gap, limit in zip(found, limits, strict=True))
