"""Compiles the language head's kernel for the card and checks the order of its loads, barriers and stores."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from cepo.models.head_kernel import log_probs_in_place
from lab.gpu_dry.cards import report
from lab.gpu_dry.kernels import loads_of_single_entries_are_safe, shared_memory
from testing.shapes import SHAPES


def main(shape: str, dtype: str) -> None:
    logits = torch.zeros(4, SHAPES[shape].vocabulary, device="cuda", dtype=getattr(torch, dtype))
    targets = torch.zeros(4, dtype=torch.int64, device="cuda")
    for with_direction in (True, False):
        log_probs_in_place(logits, targets, 1.0, with_direction=with_direction)
    sources = [file.read_text() for file in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.ptx")]
    assert len(sources) == 2, f"{len(sources)} kernels were compiled, of 2"
    safe = all(loads_of_single_entries_are_safe(ptx) for ptx in sources)
    order = "the target is read before a barrier" if safe else "RACE: the target's logit is read after the last barrier"
    report(ok=safe, found=f"{order}; {max(shared_memory().values())} B of shared memory")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
