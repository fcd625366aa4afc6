"""Defines problems of an exact prompt length, and the responses' lengths and verdicts, for all compared programs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from testing.shapes import SHAPES, Shape, prompt_text, random_image, response_lengths

if TYPE_CHECKING:
    from cepo.models.processing import Processing

RIGHT, WRONG = "7", "8"
"""The answer of every problem, and that of a wrong response."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """The lengths and endings of responses, as a function of the step.

    Attributes:
        prompts: per step.
        dead_share: share of the prompts (rounded) whose responses are all wrong; elsewhere every second one is correct.
    """

    shape: Shape
    prompts: int
    dead_share: float = 0.0

    def lengths(self, step: int) -> list[list[int]]:
        """Returns the number of response tokens of each sample of each prompt."""
        size = self.shape.group_size
        flat = response_lengths(self.shape, self.prompts * size, seed=step)
        return [flat[start : start + size] for start in range(0, len(flat), size)]

    def is_right(self, prompt: int, sample: int) -> bool:
        return not self.is_dead(prompt) and sample % 2 == 0

    def is_dead(self, prompt: int) -> bool:
        return prompt < round(self.dead_share * self.prompts)

    def ending(self, processing: Processing, *, right: bool) -> list[int]:
        """Returns the last tokens of a response: an answer and the end of the turn."""
        return [*processing.encode_text(rf"\boxed{{{RIGHT if right else WRONG}}}"), processing.eos_token_ids[0]]


@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """The work of measured steps, which is the same for all compared programs.

    Attributes:
        folder: for the model, the problems and the run.
        shape: a name in `SHAPES`.
        prompts, dead_share: see `Script`.
        lora_rank: 0 for full fine-tuning.
        micro_batch: rows per micro-batch of the update.
    """

    folder: str
    shape: str
    prompts: int
    steps: int
    dead_share: float = 0.0
    lora_rank: int = 16
    micro_batch: int = 8
    gradient_checkpointing: bool = False

    @property
    def script(self) -> Script:
        """The script of these steps' responses."""
        return Script(shape=SHAPES[self.shape], prompts=self.prompts, dead_share=self.dead_share)


def write_problems(shape: Shape, file: Path, processing: Processing, *, count: int) -> Path:
    """Writes a Parquet file in Geo3k's format, with an image per problem; keeps a file of the same shape and count."""
    from filelock import FileLock

    kind = file.with_suffix(".json")
    wanted = json.dumps({"shape": repr(shape), "count": count})
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_suffix(".lock")):
        if not (file.is_file() and kind.is_file() and kind.read_text(encoding="utf-8") == wanted):
            _write_problems(shape, file, processing, count)
            kind.write_text(wanted, encoding="utf-8")
    return file


def _write_problems(shape: Shape, file: Path, processing: Processing, count: int) -> None:
    from datasets import Dataset, Features, Image, List, Value

    columns = {
        "images": [[random_image(shape, index)] for index in range(count)],
        "problem": [prompt_text(shape, processing, index) for index in range(count)],
        "answer": [RIGHT] * count,
    }
    features = Features({"images": List(Image()), "problem": Value("string"), "answer": Value("string")})
    Dataset.from_dict(columns, features=features).to_parquet(str(file))
