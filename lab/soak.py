"""Trains for hundreds of steps with images and measures what must not grow: memory, handles, threads, caches, disk.

    python3 lab/soak.py [--steps 500] [--only NAME] [--out FILE]

Each run trains on the built-in toy task, with new problems in every step, a validation every 100 steps and a checkpoint
every 50. The trainer's process and its child processes (reward workers, and under Ray the cluster and the ranks) are
measured 50 times, in a run of 500 steps after every tenth.

- `transformers` trains all weights with two teachers with averaged weights and a KL in the loss.
- `vllm` trains an adapter.
- `ray` trains on two ranks with a KL over the vocabulary, which keeps hidden states.

For each figure, a line is fitted by least squares to the steps after the warm-up (the first 30 %). A figure is flat if
the upper end of the slope's 95 % interval, times 500 steps, is below its bound in `BOUNDS`. The exit code is 1 if any
figure is not flat. With `--only`, the record keeps the other runs if they have the same number of steps.

The figures of /dev/shm are those of the whole machine. Run this where no other program uses it, or with a separate
/dev/shm: `unshare -m sh -c 'mount -t tmpfs none /dev/shm && exec python3 ...'`.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import json
import math
import multiprocessing
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
if TYPE_CHECKING:
    from cepo.trainer.loop import Trainer

Figures = dict[str, float]
MIB = 2**20
PER_STEPS = 500
WARM_UP = 0.3
STUDENT = 2.04
"""Student's t for a 95 % interval with 30 degrees of freedom; a run of 500 steps has 33."""
BOUNDS: Mapping[str, float] = {
    "resident_bytes": 32 * MIB,
    "resident_bytes_of_children": 32 * MIB,
    "tensor_bytes": 0.5 * MIB,
    "python_objects": 2000,
    "cached_entries": 100,
    "file_handles": 1,
    "threads": 1,
    "child_processes": 1,
    "shared_memory_entries": 1,
    "shared_memory_bytes": MIB,
    "disk_bytes_of_checkpoints": MIB,
    "disk_bytes_of_records": 16 * MIB,
}
"""The growth of each figure over 500 steps below which it is flat. Memory by name shows which child process grows."""

COMMON = [
    f"config={ROOT}/configs/microgeo/cepo.yaml",
    "data.max_response_length=24",
    "data.rollout_batch_size=2",
    "data.val_batch_size=8",
    "worker.actor.global_batch_size=2",
    "worker.actor.optim.lr=1e-6",
    "worker.rollout.n=4",
    "worker.reward.num_cpus=1",
    "trainer.val_max_samples=8",
    "trainer.val_freq=100",
    "trainer.save_freq=50",
    "trainer.save_limit=2",
    "trainer.logger=[file,tensorboard]",
]
RUNS: Mapping[str, Sequence[str]] = {
    "transformers": [
        "worker.rollout.name=transformers",
        "algorithm.teacher.source=ema",
        "algorithm.disable_kl=false",
        "algorithm.use_kl_loss=true",
    ],
    "vllm": ["worker.rollout.name=vllm", "worker.actor.model.lora.rank=4"],
    "ray": [
        "worker.rollout.name=transformers",
        "algorithm.disable_kl=false",
        "algorithm.use_kl_loss=true",
        "algorithm.kl_penalty=low_var_kl",
        "trainer.launcher=ray",
        "trainer.n_gpus_per_node=2",
    ],
}


def tensor_bytes() -> int:
    """Returns the bytes of all tensors in this process; each storage counts once."""
    import torch

    storages = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):  # isinstance would ask each object for its class
            local = getattr(each, "_local_tensor", each)
            storages[local.untyped_storage()._cdata] = local.untyped_storage().nbytes()
    return sum(storages.values())


def cached_entries() -> int:
    """Returns the number of results in the caches of the package's functions (`functools.lru_cache`)."""
    kind = functools._lru_cache_wrapper
    caches: list[Any] = [each for each in gc.get_objects() if type(each) is kind]
    return sum(each.cache_info().currsize for each in caches if str(each.__module__).startswith("cepo"))


def disk_bytes(folder: Path) -> Figures:
    """Returns the bytes of the checkpoints in a run folder, and those of its other files, to which each step adds."""
    sizes = {file.relative_to(folder): file.lstat().st_size for file in folder.rglob("*") if file.is_file()}
    checkpoints = sum(size for file, size in sizes.items() if file.parts[0].startswith("global_step_"))
    return {
        "disk_bytes_of_checkpoints": checkpoints,
        "disk_bytes_of_records": sum(sizes.values()) - checkpoints,
    }


def measured(folder: Path) -> Figures:
    """Measures this process, its children and its run folder, after Python and C have released unused memory."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    process = psutil.Process()
    children = process.children(recursive=True)
    resident = [(child.name(), child.memory_info().rss) for child in children]
    by_name = {f"resident_bytes_of {name}": 0.0 for name, _ in resident}
    for name, size in resident:
        by_name[f"resident_bytes_of {name}"] += size
    shared = [file.stat().st_size for file in Path("/dev/shm").iterdir()]
    by_name |= disk_bytes(folder)
    return by_name | {
        "resident_bytes": process.memory_info().rss,
        "resident_bytes_of_children": sum(size for _, size in resident),
        "tensor_bytes": tensor_bytes(),
        "python_objects": len(gc.get_objects()),
        "cached_entries": cached_entries(),
        "file_handles": process.num_fds() + sum(child.num_fds() for child in children),
        "threads": process.num_threads() + sum(child.num_threads() for child in children),
        "child_processes": len(children),
        "shared_memory_entries": len(shared),
        "shared_memory_bytes": sum(shared),
    }


def watched(trainer: Trainer, every: int, folder: Path) -> list[Figures]:
    """Returns a list to which the figures are added after each `every`-th step of the trainer."""
    plain, figures = trainer.train_step, list[Figures]()

    def train_step(step: int) -> None:
        plain(step)
        if (step + 1) % every == 0:
            figures.append({"step": step + 1} | measured(folder))

    trainer.train_step = train_step  # type: ignore[method-assign]
    return figures


def train(settings: Sequence[str], num_steps: int, out: Path) -> None:
    """Trains in this process and writes the figures to `out`."""
    import torch

    from cepo.config import check_config, load_config
    from cepo.data import read_ahead
    from cepo.train import build_trainer

    torch.set_num_threads(1)
    read_ahead.WORTHWHILE_SECONDS = 0.0  # its thread is there from the first steps, not from the first slow one
    folder = out.with_suffix("")
    config = load_config(
        [*COMMON, *settings, f"trainer.max_steps={num_steps}", f"trainer.save_checkpoint_path={folder}"]
    )
    check_config(config)
    with ExitStack() as stack:
        trainer = build_trainer(config, stack)
        figures = watched(trainer, max(1, num_steps // 50), folder)
        trainer.fit()
    out.write_text(json.dumps(figures), encoding="utf-8")


def growth(steps: Sequence[float], values: Sequence[float]) -> dict[str, float]:
    """Returns the slope, its standard error and the upper end of its 95 % interval, each times `PER_STEPS`.

    The slope is `b = sum((x - mean x) (y - mean y)) / sum((x - mean x)^2)`, and its standard error is
    `sqrt(s^2 / sum((x - mean x)^2))`, with s^2 the sum of squared residuals divided by n - 2.
    """
    slope, intercept = statistics.linear_regression(steps, values)
    residuals = sum((y - intercept - slope * x) ** 2 for x, y in zip(steps, values, strict=True))
    error = math.sqrt(residuals / (len(steps) - 2) / (statistics.pvariance(steps) * len(steps)))
    upper = slope + STUDENT * error
    return {name: value * PER_STEPS for name, value in (("slope", slope), ("standard_error", error), ("upper", upper))}


def verdicts(figures: Sequence[Figures]) -> dict[str, dict[str, Any]]:
    """Returns level and growth per 500 steps of each figure after warm-up, and whether it is flat."""
    kept = [each for each in figures if each["step"] > WARM_UP * figures[-1]["step"]]
    found = {}
    for name, bound in BOUNDS.items():
        if name not in kept[0]:  # a record of 2026-11-22 has no disk
            continue
        grown = growth([each["step"] for each in kept], [each[name] for each in kept])
        found[name] = {"level": kept[-1][name], **grown, "bound": bound, "flat": grown["upper"] < bound}
    return found


def main() -> int:
    """Trains the runs one after the other, each in its own process, and writes their figures."""
    from lab.support.machine import machine_record
    from lab.support.tables import RESULTS, save, table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=PER_STEPS)
    parser.add_argument("--only", choices=list(RUNS), help="one of the runs")
    parser.add_argument("--out", type=Path, default=RESULTS / "soak.json")
    options = parser.parse_args()
    earlier = json.loads(options.out.read_text(encoding="utf-8")) if options.out.is_file() else {}
    runs = earlier["runs"] if earlier.get("steps") == options.steps else {}
    record: dict[str, Any] = machine_record(1) | {"steps": options.steps, "per_steps": PER_STEPS, "runs": runs}
    with tempfile.TemporaryDirectory(prefix="cepo-soak-") as scratch:
        for name in [options.only] if options.only else RUNS:
            out = Path(scratch) / f"{name}.json"
            process = multiprocessing.get_context("spawn").Process(target=train, args=(RUNS[name], options.steps, out))
            process.start()
            process.join()
            figures = json.loads(out.read_text(encoding="utf-8"))
            runs[name] = {"date": record["date"], "verdicts": verdicts(figures), "figures": figures}
    head = ["run", "figure", "at the end", "growth in 500 steps", "standard error", "bound", "flat"]
    rows = [
        [
            name,
            figure,
            f"{one['level']:,.0f}",
            *(f"{one[key]:,.1f}" for key in ("slope", "standard_error", "bound")),
            one["flat"],
        ]
        for name, run in runs.items()
        for figure, one in run["verdicts"].items()
    ]
    save(record, [table(head, rows)], options.out)
    return int(not all(one["flat"] for run in runs.values() for one in run["verdicts"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
