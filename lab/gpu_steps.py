"""Takes two whole training steps with random weights of a shape's sizes, as `cepo train` does, and keeps their times.

    python -m lab.gpu_steps --device cuda --shape 2b --out FOLDER

CEPO with two teachers, an adapter of rank 16, vLLM if it is installed, and settings that are left to the card: passes,
recomputation, compiled layers, sleep. The first step compiles; the second is the figure. A verdict is a bit of the
response's digest, so that groups are mixed. FOLDER gets `steps.json`. Exit code: 1 if an update was skipped
since its gradient is not finite, else that of the run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lab.stages import SHORT_NAMES
from lab.support.machine import ROOT
from testing.shapes import SHAPES, Shape, random_image, write_checkpoint

REWARD = '''"""Verdicts of random weights: a bit of the response's digest."""
import hashlib

REWARD_TYPE = "batch"


def _byte(text):
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()[0]


def extract_answer(text):
    return str(1000 + _byte(text))


def compute_score(reward_inputs, **settings):
    verdicts = (float(_byte(row["response"]) % 2) for row in reward_inputs)
    return [{"overall": verdict, "accuracy": verdict} for verdict in verdicts]
'''


def write_problems(shape: Shape, folder: Path, count: int) -> Path:
    """Writes rows with an image each; returns their file."""
    file = folder / "rows.jsonl"
    with file.open("w", encoding="utf-8") as rows:
        for number in range(count):
            image = folder / f"{number}.png"
            random_image(shape, number).save(image)
            row = {"problem": f"<image>3 + {number} + 5 = ?", "answer": str(8 + number), "images": [str(image)]}
            rows.write(json.dumps(row) + "\n")
    return file


def settings(shape: Shape, folder: Path, options: argparse.Namespace) -> list[str]:
    """Returns the arguments of `cepo train`."""
    problems = write_problems(shape, folder, 2 * options.prompts)
    reward = folder / "reward.py"
    reward.write_text(REWARD, encoding="utf-8")
    return [
        f"config={ROOT / 'configs' / 'geo3k' / 'cepo.yaml'}",
        f"worker.actor.model.model_path={folder / 'model'}",
        f"data.train_files={problems}",
        "data.val_files=null",
        "data.prompt_key=problem",
        "data.format_prompt=null",
        f"data.max_prompt_length={shape.prompt_tokens + 128}",
        f"data.max_response_length={options.response}",
        f"data.rollout_batch_size={options.prompts}",
        f"worker.actor.global_batch_size={options.prompts}",
        f"worker.reward.reward_function={reward}:compute_score",
        f"worker.reward.answer_function={reward}:extract_answer",
        "trainer.max_steps=2",
        "trainer.val_freq=-1",
        "trainer.val_before_train=false",
        "trainer.save_freq=-1",
        "trainer.logger=[console,file]",
        f"trainer.save_checkpoint_path={folder / 'run'}",
        *options.settings,
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=sorted({*SHAPES, *SHORT_NAMES}), default="micro")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--response", type=int, default=512, help="most tokens of a response")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("settings", nargs="*", help="further settings of the run, a.b=c")
    options = parser.parse_args()
    name = str(options.shape)
    shape = SHAPES[SHORT_NAMES.get(name, name)]
    from cepo.config import load_config
    from cepo.train import train

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        dtype = "bfloat16" if options.device == "cuda" else "float32"
        write_checkpoint(shape, folder / "model", device=options.device, dtype=dtype)
        begun = time.monotonic()
        train(load_config(settings(shape, folder, options)))
        seconds = time.monotonic() - begun
        lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps: list[dict[str, Any]] = [json.loads(line) for line in lines]
    steps = [step for step in steps if "timing_s/step" in step]
    kept = [
        {
            name: value
            for name, value in step.items()
            if name.startswith(("timing_s/", "perf/", "work/", "actor/grad_norm"))
        }
        for step in steps
    ]
    start = seconds - sum(step["timing_s/step"] for step in steps)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "steps.json").write_text(json.dumps({"start_seconds": start, "steps": kept}, indent=1) + "\n")
    print(f"start and end {start:.0f} s; steps {', '.join(format(step['timing_s/step'], '.1f') for step in steps)} s")
    skipped = [number for number, step in enumerate(steps, start=1) if step.get("actor/skipped_updates")]
    if skipped:
        print(f"lab.gpu_steps: gradients that are not finite in steps {skipped}")
    return int(bool(skipped))


if __name__ == "__main__":
    sys.exit(main())
