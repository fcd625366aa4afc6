"""Seconds and tokens of scoring and update, with and without sharing: the padded path against the packed one, in pairs.

    python3 benchmarks/stages.py --shape small
    python3 benchmarks/stages.py --shape micro --group-size 32 --prompt 700 --contexts 3

Both paths score the same rows (a student's and, behind contexts of their own, each teacher's) and update on the student's rows,
with LoRA of rank 16 and gradient checkpointing, in float32 on one thread. `padded` is what a trainer without sharing does:
one pass per context, passes of 16 rows (4 in the update) as long as their longest row, the picture encoded in every pass.
`packed` is how training runs. The paths take turns; a ratio is the median over the pairs. Seconds are those of the process on
its one thread, which other work on the machine does not lengthen; wall seconds are recorded beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shapes import SHAPES, Shape, build_checkpoint, build_rows

if TYPE_CHECKING:
    from cepo.data.batch import OptimizerBatch, ScoringRow
    from cepo.workers.actor import Actor

ROOT = Path(__file__).resolve().parent.parent
PATHS = ("padded", "packed")
STAGES = ("score student", "score all", "update")


def build_actor(folder: Path, path: str, longest_row: int) -> Actor:
    """The policy on a random checkpoint; for `padded` as a trainer without sharing has it."""
    from cepo.algorithms.settings import TeacherConfig
    from cepo.config import load_config
    from cepo.losses.objective import ObjectiveSettings
    from cepo.models.processing import Processing
    from cepo.workers.actor import Actor
    from cepo.workers.scoring_model import PictureEncoder

    shared = str(path == "packed").lower()
    settings = {
        "model.model_path": folder,
        "model.lora.rank": 16,
        "model.enable_gradient_checkpointing": "true",
        "fsdp.mp_param_dtype": "fp32",
        "optim.lr": 0,
        "micro_batch_size_per_device_for_update": 4,
        "micro_batch_size_per_device_for_experience": 16,
        "padding_free": shared,
        "dynamic_batching": shared,
    }
    arguments = [f"worker.actor.{name}={value}" for name, value in settings.items()]
    config = load_config([f"config={ROOT / 'configs' / 'microgeo' / 'base.yaml'}", *arguments])
    actor = Actor(
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
    if path == "padded":
        actor.module.encoder = PictureEncoder(keep=False)
    return actor


def optimizer_batch(rows: list[ScoringRow]) -> OptimizerBatch:
    """The rows with advantages of both signs."""
    import torch

    from cepo.data.batch import OptimizerBatch
    from cepo.losses.policy import LossDenominators

    lengths = torch.tensor([len(row.response_ids) for row in rows])
    mask = torch.arange(int(lengths.max())).unsqueeze(0) < lengths.unsqueeze(1)
    advantages = torch.linspace(-1, 1, len(rows)).unsqueeze(1).expand(mask.shape).where(mask, 0.0)
    return OptimizerBatch(
        rows=rows,
        old_log_probs=torch.zeros(mask.shape),
        advantages=advantages,
        response_mask=mask,
        denominators=LossDenominators(int(lengths.sum()), len(rows), int(lengths.max())),
        on_policy=True,
    )


def stage(actor: Actor, name: str, contexts: list[list[ScoringRow]], *, packed: bool) -> Callable[[], Any]:
    """The work of one stage."""
    batch = optimizer_batch(contexts[0])
    if name == "update":
        return lambda: actor.update([batch], step=0)
    views = contexts if name == "score all" else contexts[:1]
    if packed:
        return lambda: actor.score([row for view in views for row in view])
    return lambda: [actor.score(view) for view in views]


def measured(actor: Actor, work: Callable[[], Any]) -> dict[str, float]:
    """Seconds and computed tokens of one run of `work`, with no picture known beforehand."""
    actor.module.encoder.forget()
    computed = actor.passes.tokens_computed
    wall, process = time.perf_counter(), time.process_time()
    work()
    return {
        "seconds": time.process_time() - process,
        "wall_seconds": time.perf_counter() - wall,
        "tokens": actor.passes.tokens_computed - computed,
    }


def matrix_product_flops(work: Callable[[], Any]) -> int:
    """Operations of matrix products outside attention, whose kernels the counter does not know."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def compare(
    actors: dict[str, Actor], contexts: list[list[ScoringRow]], stages: list[str], repeats: int, *, with_flops: bool
) -> dict[str, Any]:
    """For each stage both paths' medians and the median of their ratios."""
    found: dict[str, Any] = {}
    for name in stages:
        works = {path: stage(actor, name, contexts, packed=path == "packed") for path, actor in actors.items()}
        flops = {path: matrix_product_flops(work) for path, work in works.items()} if with_flops else {}
        runs = [{path: measured(actors[path], works[path]) for path in PATHS} for _ in range(repeats)]
        found[name] = {
            path: {key: statistics.median(run[path][key] for run in runs) for key in runs[0][path]}
            | ({"matrix_product_flops": flops[path]} if with_flops else {})
            for path in PATHS
        }
        for key in ("seconds", "wall_seconds", "tokens"):
            found[name][f"{key}_ratio"] = statistics.median(run["packed"][key] / run["padded"][key] for run in runs)
        if with_flops:
            found[name]["flops_ratio"] = flops["packed"] / flops["padded"]
    if not {"score student", "score all"} <= set(stages):
        return found
    extra = {path: found["score all"][path]["seconds"] - found["score student"][path]["seconds"] for path in PATHS}
    found["teachers"] = {path: {"seconds": seconds} for path, seconds in extra.items()}
    found["teachers"]["seconds_ratio"] = extra["packed"] / extra["padded"]
    return found


def largest_gap(actors: dict[str, Actor], contexts: list[list[ScoringRow]]) -> float:
    """Between the paths' log-probs of some rows of every context, in nats."""
    rows = [row for view in contexts for row in view[:: max(1, len(view) // 2)]]
    scores = [actors[path].score(rows) for path in PATHS]
    return max(float((one - other).abs().max()) for one, other in zip(*scores, strict=True))


def table(stages: dict[str, Any]) -> str:
    """The figures as a Markdown table."""
    lines = [
        "| stage | padded, s | packed, s | ratio | padded tokens | packed tokens | ratio | ratio of FLOPs |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in (name for name in STAGES if name in stages):
        found = stages[name]
        padded, packed = found["padded"], found["packed"]
        flops = f"{found['flops_ratio']:.2f}" if "flops_ratio" in found else "not counted"
        lines.append(
            f"| {name} | {padded['seconds']:.2f} | {packed['seconds']:.2f} | {found['seconds_ratio']:.2f} "
            f"| {padded['tokens']:,.0f} | {packed['tokens']:,.0f} | {found['tokens_ratio']:.2f} "
            f"| {flops} |"
        )
    if "teachers" in stages:
        padded, packed = (stages["teachers"][path]["seconds"] for path in PATHS)
        ratio = stages["teachers"]["seconds_ratio"]
        lines.append(f"| teachers (difference) | {padded:.2f} | {packed:.2f} | {ratio:.2f} | | | | |")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    from importlib.metadata import version

    import torch

    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    packages = {name: version(name) for name in ("torch", "transformers", "peft")}
    return {"processor": model, "threads": torch.get_num_threads(), "python": platform.python_version(), **packages}


def main() -> int:
    """Measures and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--contexts", type=int, default=3, help="the student's and one for each teacher")
    parser.add_argument("--prompt", type=int, help="tokens of the student's prompt; default: the shape's")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of runs")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--no-flops", action="store_true", help="spare one run of everything that counts operations")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/stages_<shape>.json")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    sys.path.insert(0, str(ROOT))
    import torch

    from cepo.models.processing import Processing

    torch.set_num_threads(options.threads)
    shape: Shape = SHAPES[options.shape]
    prompt = options.prompt or shape.prompt
    with tempfile.TemporaryDirectory() as name:
        folder = build_checkpoint(Path(name), shape)
        contexts = build_rows(
            shape,
            Processing(str(folder)),
            groups=options.groups,
            group_size=options.group_size,
            contexts=options.contexts,
            prompt=prompt,
        )
        longest = prompt + shape.hint + shape.responses[1]
        actors = {path: build_actor(folder, path, longest) for path in PATHS}
        parameters = sum(parameter.numel() for parameter in actors["packed"].module.parameters())
        gap = largest_gap(actors, contexts)  # warms both up as well
        stages = compare(actors, contexts, options.stages, options.repeats, with_flops=not options.no_flops)
    sizes = {key: getattr(options, key) for key in ("shape", "groups", "group_size", "contexts", "repeats")}
    record = {
        "sizes": sizes | {"prompt": prompt, "parameters": parameters, "responses": list(shape.responses)},
        "largest_gap_nats": gap,
        "stages": stages,
        "machine": machine(),
    }
    out = options.out or ROOT / "benchmarks" / "results" / f"stages_{options.shape}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"{table(stages)}\n\nlargest gap between the paths' log-probs: {gap:.1e} nats")
    return 0


if __name__ == "__main__":
    sys.exit(main())
