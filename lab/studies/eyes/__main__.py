"""Writes the world `eyes`: its figures, and the warm-started model that looks at them.

    python -m lab.studies.eyes --model build/eyes/model --world FOLDER
    python -m lab.studies.running_totals gates|run|records --plan lab/studies/eyes/plan.yaml ...

The model is that of `examples/eyes/tower.py`, made of the warm-started model of `running_totals`. All but the warm start
is that study's program.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cepo.data.prompts import HintTemplate
from lab.studies.eyes.problems import QUESTION, Demonstration, demonstration, drawn, figures, write_figures
from lab.studies.running_totals.study import read_plan
from lab.studies.running_totals.warm_start import Encoded, WarmStart, accumulated, fine_tune

PLAN = Path(__file__).parent / "plan.yaml"


def encoded(each: Demonstration, processor: Any, draw: random.Random) -> tuple[Encoded, Tensor]:
    """Returns a demonstration's tokens, as cepo renders prompts and teachers' contexts, and its newly drawn pixels."""
    question = QUESTION
    if each.shown is not None:
        question = HintTemplate("user_suffix").render(prompt=question, reference=each.shown)
    turns = [{"role": "user", "content": question}]
    prompt = processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    read = processor(text=prompt, images=[figures["draw"](each.figure, draw)], return_tensors="pt")
    response_ids: list[int] = processor.tokenizer(each.response, add_special_tokens=False)["input_ids"]
    return (read.input_ids[0].tolist(), [*response_ids, processor.tokenizer.eos_token_id]), read.pixel_values[0]


def teach(model_path: Path, folder: Path, chosen: Sequence[Any], settings: WarmStart, *, miscounted: float) -> None:
    """Fine-tunes the language model, not its eyes, on demonstrations of the chosen figures, and writes it to `folder`."""
    from transformers import AutoProcessor, Idefics3ForConditionalGeneration

    processor: Any = AutoProcessor.from_pretrained(model_path)
    model: Any = Idefics3ForConditionalGeneration.from_pretrained(model_path, dtype=torch.float32)
    model.model.vision_model.requires_grad_(False)
    model.model.connector.requires_grad_(False)

    def add_gradient(indices: Sequence[int]) -> float:
        rows: list[Encoded] = []
        images: list[Tensor] = []
        for index in indices:
            each = demonstration(index, chosen, seed=settings.seed, miscounted=miscounted)
            row, pixels = encoded(each, processor, random.Random(index))
            rows.append(row)
            images.append(pixels)
        return accumulated(model, rows, images)

    fine_tune(model, folder, settings, add_gradient, progress=_show)
    processor.save_pretrained(folder)


def _show(step: int, loss: float, seconds: float) -> None:
    print(f"step {step}: loss {loss:.4f}, {seconds:.0f} s", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Writes the world."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder that examples/eyes/tower.py writes")
    parser.add_argument("--world", type=Path, required=True, help="folder of data and model; outside the repository")
    parser.add_argument("--plan", type=Path, default=PLAN)
    options = parser.parse_args(argv)
    plan = read_plan(options.plan)
    folder: Path = options.world / "free"
    for name, rows in plan.problems.items():
        write_figures(folder, name, drawn(rows["count"], first=rows["first"]))
    written = dict(plan.written["warm_start"])
    demonstrated = drawn(written.pop("figures"), first=written.pop("first"))
    miscounted: float = written.pop("miscounted")
    teach(options.model, folder / "model", demonstrated, WarmStart(**written), miscounted=miscounted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
