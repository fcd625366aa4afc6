"""Memory of the workers over training steps with ever new images: it must not grow.

    python3 benchmarks/memory_over_steps.py

Each step does what a worker does in one: student and teacher scores with kept hidden states, reference scores, an update with a
divergence from the teacher, refreshed teacher weights, and all weights handed on. Prompts, images and response lengths are new
in every step; every second rank has text alone in every second step. Reported for each rank after every tenth step: the bytes
of all tensors that are alive, and resident memory once the C library has given back what it holds free (else its heap, cut up
by tensors of ever new sizes, goes up and down by some MiB). One thread for each rank, on the CPU, with a tiny model of random
weights.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cepo.data.batch import ScoringRow
    from cepo.models.processing import Processing
    from cepo.workers.actor import Actor

ROOT = Path(__file__).resolve().parent.parent
RESPONSES = 4


def resident_bytes() -> int:
    """What this process holds now, as Linux counts it, without what glibc keeps for later."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def tensor_bytes() -> int:
    """Bytes of all tensors that are alive, each storage once."""
    import torch

    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):  # isinstance would ask each object for its class
            local = getattr(each, "_local_tensor", each)
            storages[local.untyped_storage()._cdata] = local.untyped_storage().nbytes()
    return sum(storages.values())


def new_rows(processing: Processing, step: int, rank: int) -> list[ScoringRow]:
    """One prompt's responses, with an image of its own unless it is this rank's turn for text alone."""
    import numpy
    from PIL import Image

    from cepo.data.batch import ScoringRow

    random = numpy.random.default_rng([step, rank])
    images = None
    if not (rank % 2 and step % 2):
        height, width = (32 * int(side) for side in random.integers(2, 7, 2))
        images = processing.load_images([Image.fromarray(random.integers(0, 256, (height, width, 3), numpy.uint8))])
    text = ("<image>" if images is not None else "") + f"Problem {step}: " + "find x. " * int(random.integers(1, 12))
    context = processing.encode(text, images)
    lengths = random.integers(1, 40, RESPONSES)
    responses = [tuple(random.integers(0, 256, length).tolist()) for length in lengths]
    return [ScoringRow(context=context, response_ids=ids, row=row) for row, ids in enumerate(responses)]


def build_actor(folder: Path, processing: Processing, lora_rank: int) -> Actor:
    """With every copy of weights that a run may ask for."""
    from cepo.algorithms.settings import TeacherConfig
    from cepo.config import load_config
    from cepo.losses.objective import ObjectiveSettings
    from cepo.workers.actor import Actor

    settings = [f"model.model_path={folder}", "fsdp.mp_param_dtype=fp32", f"model.lora.rank={lora_rank}"]
    config = load_config([f"config={ROOT}/configs/microgeo/base.yaml", *(f"worker.actor.{each}" for each in settings)])
    return Actor(
        config.worker.actor,
        processing,
        temperature=1.0,
        teacher=TeacherConfig(source="ema", ema_decay=0.9),
        objective_settings=ObjectiveSettings(kl_coefficient=0.1),
        with_reference=True,
        total_steps=1000,
        seed=1,
    )


def train_step(actor: Actor, rows: list[ScoringRow], step: int) -> None:
    """Everything a worker does in a step, but sampling."""
    import torch
    import torch.distributed as dist

    from cepo.data.batch import DistillationRows, OptimizerBatch
    from cepo.losses.policy import LossDenominators
    from cepo.types import DivergenceConfig

    lengths = torch.tensor([len(row.response_ids) for row in rows])
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)

    def padded(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.zeros(mask.shape).masked_scatter(mask, torch.cat(values))

    old = padded(actor.score(rows))
    hinted = [dataclasses.replace(row, view="hinted") for row in rows]
    actor.score(hinted, as_teacher=True, keep_states="hinted")
    reference = padded(actor.score_reference(rows))
    distillation = DistillationRows(divergence=DivergenceConfig(kind="jsd"), token_weight=mask.float(), view="hinted")
    num_ranks = dist.get_world_size()
    batch = OptimizerBatch(
        rows=rows,
        old_log_probs=old,
        advantages=torch.randn(mask.shape).where(mask, 0.0),
        response_mask=mask,
        denominators=LossDenominators(100 * num_ranks, RESPONSES * num_ranks, 40),
        reference_log_probs=reference,
        distillation=distillation,
    )
    actor.update([batch], step=step)
    actor.finish_step(step)
    for tensor in actor.rollout_weights().tensors.values():
        assert tensor.numel() > 0


def run_rank(rank: int, num_ranks: int, folder: str, num_steps: int, lora_rank: int) -> None:
    """Writes this rank's figures beside the model."""
    import torch
    import torch.distributed as dist

    from cepo.models.processing import Processing

    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous_{lora_rank}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    processing = Processing(f"{folder}/model")
    actor = build_actor(Path(folder) / "model", processing, lora_rank)
    figures: list[dict[str, int]] = []
    for step in range(num_steps):
        train_step(actor, new_rows(processing, step, rank), step)
        if (step + 1) % 10 == 0:
            figures.append({"step": step + 1, "resident_bytes": resident_bytes(), "tensor_bytes": tensor_bytes()})
    (Path(folder) / f"figures_{lora_rank}_{rank}.json").write_text(json.dumps(figures), encoding="utf-8")
    dist.destroy_process_group()


def measure(num_ranks: int, num_steps: int, lora_rank: int) -> list[list[dict[str, int]]]:
    """Figures of each rank."""
    import torch.multiprocessing as processes

    from cepo.microgeo.model import build_untrained_model

    with tempfile.TemporaryDirectory() as folder:
        build_untrained_model(Path(folder) / "model", seed=0)
        processes.start_processes(
            run_rank, (num_ranks, folder, num_steps, lora_rank), nprocs=num_ranks, start_method="spawn"
        )
        paths = [Path(folder) / f"figures_{lora_rank}_{rank}.json" for rank in range(num_ranks)]
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "memory_over_steps.json")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "ranks": arguments.ranks}
    for name, lora_rank in (("adapter", 4), ("all weights", 0)):
        result[name] = measure(arguments.ranks, arguments.steps, lora_rank)
        for rank, figures in enumerate(result[name]):
            for each in figures:
                print(
                    f"{name}, rank {rank}, step {each['step']}: {each['resident_bytes'] / 2**20:.1f} MiB resident, "
                    f"{each['tensor_bytes'] / 2**20:.2f} MiB in tensors"
                )
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
