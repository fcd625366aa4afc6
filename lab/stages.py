"""Measures seconds and tokens of sampling, scoring and update, and compares padded with packed rows.

    python -m lab.stages --shape small
    python -m lab.stages --shape 2b --device cuda --groups 4
    python -m lab.stages --shape small --stages teachers --profile

Both paths score the same rows (the student's, and each teacher's with its own context) and update on the student's
rows, with LoRA of rank 16 and gradient checkpointing. The paths alternate; a ratio is the median over the pairs.

- `padded` is a trainer without sharing: one pass per context, passes of 16 rows (4 in the update) as long as their
  longest row, and the image encoded in every pass. `packed` is how training runs. Sampling, with transformers, has one
  path.
- `teachers` scores only the teachers' rows, as training does if the update starts from the weights that sampled.
  `teachers (difference)` is the time that they add if the student is scored with them.

On a CPU, computation is in float32 and times are processor times of the process on its one thread, which other work on
the machine does not increase. On a GPU, computation is in bf16, the device is synchronised before and after each run,
and times are those between two of its events. Wall times are recorded too. `--profile` runs each stage of the packed
path again under torch's profiler.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.support.machine import ROOT, load_average, machine_record
from lab.support.profiling import flop_counter, profile_stages, profile_tables
from lab.support.tables import RESULTS
from testing.rows import HINT_TOKENS, build_rows, generation_requests, optimizer_batch
from testing.shapes import SHAPES, Shape, write_checkpoint

if TYPE_CHECKING:
    from cepo.data.batch import ScoringRow
    from cepo.losses.objective import ObjectiveSettings
    from cepo.workers.actor import Actor

PATHS = ("padded", "packed")
COMPARED = ("score student", "teachers", "score all", "update")
STAGES = ("generate", *COMPARED)
DIFFERENCE = "teachers (difference)"
SHORT_NAMES = {"2b": "qwen3-vl-2b", "4b": "qwen3-vl-4b"}
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
NO_CUDA = 3
"""Exit code if a GPU is requested and there is none."""


def build_actor(
    folder: Path,
    path: str,
    longest_row: int,
    dtype: str,
    *,
    lora_rank: int = 16,
    objective: ObjectiveSettings | None = None,
) -> Actor:
    """Builds the policy from a random checkpoint; for `padded`, as in a trainer without sharing.

    `lora_rank` 0 trains all weights; `objective` is by default that of an untouched configuration.
    """
    from cepo.algorithms.settings import TeacherConfig
    from cepo.config import load_config
    from cepo.losses.objective import ObjectiveSettings
    from cepo.models.processing import Processing
    from cepo.workers.actor import Actor
    from cepo.workers.scoring_model import ImageEncoder

    shared = str(path == "packed").lower()
    settings = {
        "model.model_path": folder,
        "model.lora.rank": lora_rank,
        "model.enable_gradient_checkpointing": "true",
        "fsdp.mp_param_dtype": dtype,
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
        objective_settings=objective or ObjectiveSettings(),
        with_reference=False,
        total_steps=10,
        seed=1,
        longest_row=longest_row,
    )
    if path == "padded":
        actor.module.encoder = ImageEncoder(keep=False)
    return actor


def stage(actor: Actor, name: str, contexts: list[list[ScoringRow]], *, packed: bool) -> Callable[[], Any]:
    batch = optimizer_batch(contexts[0])
    if name == "update":
        return lambda: actor.update([batch], step=0)
    views = {"score student": contexts[:1], "teachers": contexts[1:], "score all": contexts}[name]
    if packed:
        return lambda: actor.score([row for view in views for row in view])
    return lambda: [actor.score(view) for view in views]


def timed(work: Callable[[], Any]) -> dict[str, float]:
    """Returns the seconds of one run of `work`, and on a GPU its peak of allocated bytes."""
    import torch

    if not torch.cuda.is_available():
        wall, process = time.perf_counter(), time.process_time()
        work()
        return {"seconds": time.process_time() - process, "wall_seconds": time.perf_counter() - wall}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    wall = time.perf_counter()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return {
        "seconds": begin.elapsed_time(end) / 1000,
        "wall_seconds": time.perf_counter() - wall,
        "peak_bytes": float(torch.cuda.max_memory_allocated()),
    }


def measured(actor: Actor, work: Callable[[], Any]) -> dict[str, float]:
    """Returns seconds and computed tokens of one run of `work`, without cached image features."""
    actor.module.encoder.forget()
    computed = actor.tokens_computed
    found = timed(work)
    return found | {"tokens": float(actor.tokens_computed - computed)}


def generation(
    folder: Path, shape: Shape, *, prompts: int, samples: int, length: int, dtype: str, repeats: int
) -> dict[str, Any]:
    """Measures sampling `samples` responses of `length` tokens per prompt; returns medians of runs after the first."""
    import torch

    from cepo.models.processing import Processing
    from cepo.rollout.generator import GeneratorSettings, SamplingSettings
    from cepo.rollout.transformers_generator import TransformersGenerator

    processing = Processing(str(folder))
    chosen = GeneratorSettings(model_path=str(folder), dtype=dtype, max_model_len=shape.prompt_tokens + length)
    generator = TransformersGenerator(chosen, processing, device="cuda" if torch.cuda.is_available() else "cpu")
    requests = generation_requests(shape, processing, count=prompts)
    settings = SamplingSettings(num_samples=samples, max_response_length=length, ignore_eos=True)
    runs = [timed(lambda: generator.generate(requests, settings)) for _ in range(repeats + 1)][1:]
    generator.close()
    found = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    tokens = prompts * samples * length
    return found | {"tokens": tokens, "tokens_per_second": tokens / found["seconds"], "samples": samples}


def matrix_product_flops(actor: Actor, work: Callable[[], Any]) -> int:
    """Counts operations of matrix products, images included, without attention, whose kernels the counter ignores."""
    actor.module.encoder.forget()
    with flop_counter() as counter:
        work()
    return counter.get_total_flops()


def compare(
    actors: dict[str, Actor], contexts: list[list[ScoringRow]], stages: list[str], repeats: int, *, with_flops: bool
) -> dict[str, Any]:
    """Returns, for each stage, both paths' medians and the median of their ratios."""
    found: dict[str, Any] = {}
    for name in (name for name in stages if name != "generate"):
        works = {path: stage(actor, name, contexts, packed=path == "packed") for path, actor in actors.items()}
        flops = {path: matrix_product_flops(actors[path], work) for path, work in works.items()} if with_flops else {}
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
    if len(contexts) == 1 or not {"score student", "score all"} <= set(stages):
        return found
    extra = {path: found["score all"][path]["seconds"] - found["score student"][path]["seconds"] for path in PATHS}
    found[DIFFERENCE] = {path: {"seconds": seconds} for path, seconds in extra.items()}
    found[DIFFERENCE]["seconds_ratio"] = extra["packed"] / extra["padded"]
    return found


def profiles(
    actor: Actor, contexts: list[list[ScoringRow]], stages: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """Runs `profile_stages` on the packed path's measured stages, each without cached image features."""

    def unprepared(work: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> None:
            actor.module.encoder.forget()
            work()

        return run

    works = {
        name: (unprepared(stage(actor, name, contexts, packed=True)), int(stages[name]["packed"]["tokens"]))
        for name in COMPARED
        if name in stages
    }
    return profile_stages(works, SHAPES[options.shape], device=options.device, dtype=DTYPES[options.dtype])


def largest_gap(actors: dict[str, Actor], contexts: list[list[ScoringRow]]) -> float:
    """Returns the largest gap in nats between the paths' log-probs, of some rows of every context."""
    rows = [row for view in contexts for row in view[:: max(1, len(view) // 2)]]
    scores = [actors[path].score(rows) for path in PATHS]
    return max(float((one - other).abs().max()) for one, other in zip(*scores, strict=True))


def table(stages: dict[str, Any]) -> str:
    lines = [
        "| stage | padded, s | packed, s | ratio | padded tokens | packed tokens | ratio | ratio of FLOPs |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in (name for name in COMPARED if name in stages):
        found = stages[name]
        padded, packed = found["padded"], found["packed"]
        flops = f"{found['flops_ratio']:.2f}" if "flops_ratio" in found else "not counted"
        lines.append(
            f"| {name} | {padded['seconds']:.2f} | {packed['seconds']:.2f} | {found['seconds_ratio']:.2f} "
            f"| {padded['tokens']:,.0f} | {packed['tokens']:,.0f} | {found['tokens_ratio']:.2f} "
            f"| {flops} |"
        )
    if "generate" in stages:
        found = stages["generate"]
        lines.append(f"| generate | | {found['seconds']:.2f} | | | {found['tokens']:,.0f} | | |")
    if DIFFERENCE in stages:
        padded, packed = (stages[DIFFERENCE][path]["seconds"] for path in PATHS)
        ratio = stages[DIFFERENCE]["seconds_ratio"]
        lines.append(f"| {DIFFERENCE} | {padded:.2f} | {packed:.2f} | {ratio:.2f} | | | | |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted({*SHAPES, *SHORT_NAMES}), default="small")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--contexts", type=int, default=3, help="the student's and one for each teacher")
    parser.add_argument("--prompt", type=int, help="tokens of the student's prompt; default: the shape's")
    parser.add_argument("--response", type=int, default=128, help="tokens of each sampled response")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of runs")
    parser.add_argument("--stages", nargs="+", choices=STAGES, help="default: all")
    parser.add_argument("--no-flops", action="store_true", help="spare one run of everything that counts operations")
    parser.add_argument("--profile", action="store_true", help="the packed path's operations by their own seconds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="default: lab/results/stages_<shape>.json")
    options = parser.parse_args()
    if options.contexts == 1 and "teachers" in (options.stages or ()):
        parser.error("--stages teachers with --contexts 1: the one context is the student's; give --contexts 2 or more")
    options.stages = options.stages or [name for name in STAGES if name != "teachers" or options.contexts > 1]
    options.shape = SHORT_NAMES.get(options.shape, options.shape)
    options.dtype = options.dtype or ("bf16" if options.device == "cuda" else "fp32")
    # The counter does not know compiled attention, so it would count another computation.
    options.no_flops = options.no_flops or options.device == "cuda"
    return options


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures everything that is requested, in a temporary folder."""
    from cepo.models.processing import Processing

    shape = SHAPES[options.shape]
    prompt = options.prompt or shape.prompt_tokens
    with tempfile.TemporaryDirectory() as name:
        folder = write_checkpoint(shape, Path(name) / "model", device=options.device, dtype=DTYPES[options.dtype])
        contexts = build_rows(
            shape,
            Processing(str(folder)),
            groups=options.groups,
            group_size=options.group_size,
            contexts=options.contexts,
            prompt=prompt,
        )
        longest = prompt + HINT_TOKENS + shape.longest
        actors = {path: build_actor(folder, path, longest, options.dtype) for path in PATHS}
        parameters = sum(parameter.numel() for parameter in actors["packed"].module.parameters())
        gap = largest_gap(actors, contexts)  # also warms up both paths
        if options.device == "cuda":
            # The kernels of the update, and of all lengths, are compiled before anything is timed.
            compare(actors, contexts, options.stages, 1, with_flops=False)
        stages = compare(actors, contexts, options.stages, options.repeats, with_flops=not options.no_flops)
        if "generate" in options.stages:
            stages["generate"] = generation(
                folder,
                shape,
                prompts=options.groups,
                samples=options.group_size,
                length=options.response,
                dtype=options.dtype,
                repeats=options.repeats,
            )
        found = {"stages": stages}
        if options.profile:
            found |= profiles(actors["packed"], contexts, stages, options)
        packed = actors["packed"].passes.packed
    names = ("shape", "device", "dtype", "groups", "group_size", "contexts", "repeats")
    sizes = {key: getattr(options, key) for key in names}
    sizes |= {"prompt": prompt, "parameters": parameters, "responses": [shape.shortest, shape.longest]}
    return {"sizes": sizes, "still_packed": packed, "largest_gap_nats": gap, **found}


def main() -> int:
    """Measures and writes the record; returns 1 if the packed path did not pack, so that nothing was compared."""
    options = arguments()
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the trainer would use any GPU
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("lab.stages: --device cuda, but torch sees no GPU (`cepo doctor` says why)", file=sys.stderr)
        return NO_CUDA
    torch.set_num_threads(options.threads)
    record = {**machine_record(options.threads), "load_average": load_average(), **measure(options)}
    out = options.out or RESULTS / f"stages_{options.shape}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    gap = record["largest_gap_nats"]
    print(f"{table(record['stages'])}\n\nlargest gap between the paths' log-probs: {gap:.1e} nats")
    if options.profile:
        print("", *profile_tables(record), sep="\n\n")
    return 0 if record["still_packed"] else 1


if __name__ == "__main__":
    sys.exit(main())
