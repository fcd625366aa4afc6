"""Runs `cepo evaluate` on the hollow GPU: vLLM reads a small model's weights, samples, and the responses are graded.

    python -m lab.gpu_dry.evaluation

Every sampled token is the same (`hollow_vllm`), so the accuracy means nothing.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from PIL import Image

from lab.gpu_dry.cards import report
from lab.gpu_dry.hollow_vllm import stand_in
from lab.support.machine import ROOT
from testing.shapes import MICRO, write_checkpoint

PROBLEMS = 6
RESPONSE = 16


def write_problems(folder: Path) -> Path:
    """Writes problems with an image each."""
    file = folder / "problems.jsonl"
    lines: list[str] = []
    for number in range(PROBLEMS):
        picture = folder / f"{number}.png"
        Image.new("RGB", (64, 64), (number, 0, 0)).save(picture)
        problem = {"problem": f"<image>How many? {number}", "answer": str(number), "images": [str(picture)]}
        lines.append(json.dumps(problem))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def main() -> None:
    from cepo.commands.evaluate import evaluate_planned, planned
    from cepo.hardware import reserve_memory_in_growing_segments

    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # vLLM is imported here before the trainer sets it
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    reserve_memory_in_growing_segments()
    stand_in()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_checkpoint(MICRO, folder / "model", dtype="bfloat16")
        options = {"checkpoint": str(model), "data": str(write_problems(folder)), "out": str(folder / "out")}
        settings = [f"config={ROOT / 'configs' / 'microgeo' / 'base.yaml'}", "worker.rollout.name=vllm"]
        settings += ["worker.rollout.dtype=bf16", "worker.rollout.enforce_eager=true"]
        settings += [f"data.max_response_length={RESPONSE}"]
        code = evaluate_planned(planned(options, settings))
        written = (folder / "out" / "generations.jsonl").read_text(encoding="utf-8").splitlines()
    lengths = [json.loads(line)["length"] for line in written]
    report(
        ok=code == 0 and lengths == [RESPONSE] * PROBLEMS,
        found=f"{len(lengths)} responses of {max(lengths, default=0)} tokens sampled by vLLM and graded; exit code {code}",
    )


if __name__ == "__main__":
    main()
