"""Measures the levers of scoring and update, one change at a time, on one card and the same rows.

    python -m lab.gpu_levers --device cuda --shape 2b --out FOLDER

Rows: groups of 8 responses under one prompt with an image, LoRA of rank 16, packed. A variant is timed after a first
pass, which compiles, and has its own process memory: actors follow each other, and each is freed before the next.
`budget` is the tokens of a pass. FOLDER gets `levers.json`. On a CPU layers are traced but not compiled, and the figures
only show that the commands run.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lab.stages import NO_CUDA, SHORT_NAMES, timed
from lab.support.machine import ROOT
from testing.rows import build_rows, optimizer_batch
from testing.shapes import SHAPES, Shape, write_checkpoint

if TYPE_CHECKING:
    from cepo.data.batch import ScoringRow
    from cepo.workers.actor import Actor


class Variant(NamedTuple):
    name: str
    compiles: bool
    recomputes: bool
    tokens: int  # of an update's pass; scoring has four times as many


def variants(longest_row: int) -> list[Variant]:
    """Returns the variants, the most important first: time may end."""
    small, large = 4 * longest_row, 16_384
    return [
        Variant("4 rows a pass, as it is", compiles=False, recomputes=True, tokens=small),
        Variant("compiled", compiles=True, recomputes=True, tokens=small),
        Variant("compiled, budget", compiles=True, recomputes=True, tokens=large),
        Variant("compiled, budget, nothing recomputed", compiles=True, recomputes=False, tokens=large),
        Variant("budget", compiles=False, recomputes=True, tokens=large),
    ]


def build(folder: Path, variant: Variant, longest_row: int, *, dtype: str) -> Actor:
    from cepo.algorithms.settings import TeacherConfig
    from cepo.config import load_config
    from cepo.losses.objective import ObjectiveSettings
    from cepo.models.processing import Processing
    from cepo.workers.actor import Actor

    rows = max(1, variant.tokens // longest_row)
    settings = {
        "model.model_path": folder,
        "model.lora.rank": 16,
        "model.freeze_vision_tower": "true",
        "model.enable_gradient_checkpointing": str(variant.recomputes).lower(),
        "model.compile_layers": str(variant.compiles).lower(),
        "fsdp.mp_param_dtype": dtype,
        "micro_batch_size_per_device_for_update": rows,
        "micro_batch_size_per_device_for_experience": 4 * rows,
    }
    arguments = [f"worker.actor.{name}={value}" for name, value in settings.items()]
    config = load_config([f"config={ROOT / 'configs' / 'microgeo' / 'base.yaml'}", *arguments])
    return Actor(
        config.worker.actor,
        Processing(str(folder)),
        temperature=1.0,
        teacher=TeacherConfig(),
        objective_settings=ObjectiveSettings(),
        with_reference=False,
        total_steps=10,
        seed=1,
        longest_row=longest_row,
    )


def measured(actor: Actor, rows: list[ScoringRow], repeats: int) -> dict[str, Any]:
    """Returns seconds of the first update and scoring, and medians of tokens a second and of the peaks after them."""
    batch = optimizer_batch(rows)
    found: dict[str, Any] = {}
    works: dict[str, Any] = {"score": lambda: actor.score(rows), "update": lambda: actor.update([batch], step=0)}
    for stage, work in works.items():
        found[f"first_{stage}_seconds"] = timed(work)["wall_seconds"]
        computed = actor.tokens_computed
        runs = [timed(work) for _ in range(repeats)]
        tokens = (actor.tokens_computed - computed) / repeats
        found[stage] = {
            "tokens_per_second": tokens / statistics.median(run["seconds"] for run in runs),
            "gigabytes": max(run.get("peak_bytes", 0.0) for run in runs) / 1e9,
        }
    found["passes"] = len(actor.passes.cut(rows, actor.pass_sizes.update_rows))
    return found


def measure(shape: Shape, options: argparse.Namespace) -> list[dict[str, Any]]:
    import torch

    from cepo.models.compiled_layers import compile_decoder
    from cepo.models.processing import Processing
    from cepo.workers import building

    on_card = options.device == "cuda"
    if not on_card:
        building.compile_decoder = functools.partial(compile_decoder, backend="eager")  # pyright: ignore[reportAttributeAccessIssue]
    deadline = time.monotonic() + options.seconds
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        dtype = "bfloat16" if on_card else "float32"
        folder = write_checkpoint(shape, Path(scratch) / "model", device=options.device, dtype=dtype)
        (rows,) = build_rows(
            shape, Processing(str(folder)), groups=options.groups, group_size=8, contexts=1, prompt=shape.prompt_tokens
        )
        longest_row = max(row.num_tokens for row in rows)
        for variant in variants(longest_row):
            if time.monotonic() > deadline:
                print(f"{variant.name}: no time is left", flush=True)
                continue
            actor = build(folder, variant, longest_row, dtype="bf16" if on_card else "fp32")
            result: dict[str, Any] = {"name": variant.name}
            try:
                result |= measured(actor, rows, options.repeats)
            except torch.OutOfMemoryError as error:  # of a variant, which a smaller card may not hold
                result["failed"] = str(error).partition(". ")[0]
            found.append(result)
            print(json.dumps(result), flush=True)
            del actor
            gc.collect()
            torch.cuda.empty_cache()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=sorted({*SHAPES, *SHORT_NAMES}), default="micro")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=150, help="no variant begins after so many")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("lab.gpu_levers: --device cuda, but torch sees no GPU (`cepo doctor` says why)", file=sys.stderr)
        return NO_CUDA
    from cepo.hardware import reserve_memory_in_growing_segments

    reserve_memory_in_growing_segments()
    options.out.mkdir(parents=True, exist_ok=True)
    found = measure(SHAPES[SHORT_NAMES.get(options.shape, options.shape)], options)
    (options.out / "levers.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
