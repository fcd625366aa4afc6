"""Measures the peak memory of a distillation update over the whole vocabulary: in chunks, as in training, and dense.

    python3 lab/distillation_memory.py

Both ways run forward and backward of the same loss (JSD of weight 0.5, full support) on the same one-layer Qwen3 with
the same weights and tokens, each in its own process with one thread. Reported is the peak resident memory of that
process minus the resident memory before the update: logits, distributions, their gradients and the gradients of all
weights. The dense way holds the logits of all tokens of both models at once; it needs about 17 GB of memory at the
default size.

The compared processes return freed memory to the system at once, so that resident memory equals memory in use. A third
process runs the chunked way with the C library's default settings, which may keep freed blocks for later use.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from cepo.workers.scoring_model import CollatedRows, ScoringModel, TeacherStates

ROOT = Path(__file__).resolve().parent.parent
WAYS = ("chunked", "dense")
TEMPERATURE = 1.0
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""glibc maps blocks of at least this size one by one; otherwise blocks below 32 MiB are in a heap that only grows."""


def highest_resident_bytes() -> int:
    """Returns the peak resident memory of this process so far."""
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024


def build_model(vocabulary: int, hidden: int) -> ScoringModel:
    """Builds a model of one decoder layer between an embedding and a tied head, all trained, in float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from cepo.workers.scoring_model import ScoringModel

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    return ScoringModel(Qwen3ForCausalLM(config), temperature=TEMPERATURE)


def build_batch(vocabulary: int, hidden: int, tokens: int) -> tuple[CollatedRows, TeacherStates]:
    """Returns a response of `tokens` random tokens, and random states of a teacher that shares the head."""
    import torch

    from cepo.types import DivergenceConfig
    from cepo.workers.scoring_model import CollatedRows, TeacherStates

    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(vocabulary, (1, tokens + 1), generator=generator)
    batch = CollatedRows(
        input_ids=input_ids,
        position_ids=torch.arange(tokens + 1).expand(3, 1, -1),
        response_index=torch.arange(tokens),
        targets=input_ids[0, 1:],
    )
    teacher = TeacherStates(
        hidden=torch.randn(tokens, hidden, generator=generator),
        head=None,
        divergence=DivergenceConfig(kind="jsd", jsd_weight=0.5, support="full"),
    )
    return batch, teacher


def mean_divergence(way: str, module: ScoringModel, batch: CollatedRows, teacher: TeacherStates) -> Tensor:
    """Returns the loss, with the autograd graph of its way."""
    import torch

    from cepo.losses.divergence import token_divergence

    if way == "chunked":
        return module(batch, (teacher,))[1][0].mean()
    base = module.base
    states = base.model(input_ids=batch.input_ids, position_ids=batch.position_ids[0], use_cache=False)
    hidden = states.last_hidden_state[0][batch.response_index]
    with torch.no_grad():
        teacher_logits = base.lm_head(teacher.hidden) / TEMPERATURE
    student_logits = base.lm_head(hidden) / TEMPERATURE
    return token_divergence(student_logits, teacher_logits, batch.targets, teacher.divergence)[1].mean()


def measure(way: str, *, vocabulary: int, hidden: int, tokens: int) -> dict[str, Any]:
    """Measures one update in this process, which must be new."""
    import psutil
    import torch

    torch.set_num_threads(1)
    module = build_model(vocabulary, hidden)
    batch, teacher = build_batch(vocabulary, hidden, tokens)
    before, highest_before = psutil.Process().memory_info().rss, highest_resident_bytes()
    start = time.perf_counter()
    loss = mean_divergence(way, module, batch, teacher)
    loss.backward()
    seconds = time.perf_counter() - start
    highest = highest_resident_bytes()
    assert highest > highest_before, "the peak was reached before the update: nothing was measured"
    gradients = [parameter.grad for parameter in module.parameters()]
    return {
        "peak_bytes": highest - before,
        "resident_before_bytes": before,
        "seconds": seconds,
        "loss": float(loss.detach()),
        "gradient_norm": float(torch.nn.utils.get_total_norm([grad for grad in gradients if grad is not None])),
    }


def measured_in_own_process(way: str, options: argparse.Namespace, allocator: dict[str, str]) -> dict[str, Any]:
    """Runs `measure` in a new process, with these settings of the C library's allocator."""
    sizes = ["--vocabulary", options.vocabulary, "--tokens", options.tokens, "--hidden", options.hidden]
    command = [sys.executable, __file__, "--measure", way, *map(str, sizes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | allocator
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def versions() -> dict[str, str]:
    """Returns the versions on which the figures depend."""
    from importlib.metadata import version

    packages = {name: version(name) for name in ("torch", "transformers")}
    return {"python": platform.python_version(), "machine": platform.machine(), **packages}


def table(ways: dict[str, dict[str, Any]]) -> str:
    lines = ["| update | peak memory, MiB | seconds | loss | gradient norm |", "| --- | --- | --- | --- | --- |"]
    for way, found in ways.items():
        memory = f"{found['peak_bytes'] / 2**20:,.0f}"
        lines.append(
            f"| {way} | {memory} | {found['seconds']:.1f} | {found['loss']:.6f} | {found['gradient_norm']:.6f} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measures both ways and writes the record; returns 1 if the chunked way needs 1/8 of the dense one or more."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, default=2_048)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--out", type=Path, default=ROOT / "lab" / "results" / "distillation_memory.json")
    parser.add_argument("--measure", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        sizes = {"vocabulary": options.vocabulary, "hidden": options.hidden, "tokens": options.tokens}
        print(json.dumps(measure(options.measure, **sizes)))
        return 0
    ways = {way: measured_in_own_process(way, options, RETURN_FREED_MEMORY) for way in WAYS}
    ratio = ways["chunked"]["peak_bytes"] / ways["dense"]["peak_bytes"]
    ways["chunked, C library's defaults"] = measured_in_own_process("chunked", options, {})
    sizes = {"vocabulary": options.vocabulary, "response_tokens": options.tokens, "hidden": options.hidden}
    record = {"sizes": sizes, "ways": ways, "ratio": ratio, "versions": versions()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"{table(ways)}\n\nchunked / dense: 1 / {1 / ratio:.1f}")
    return 0 if ratio < 1 / 8 else 1


if __name__ == "__main__":
    sys.exit(main())
