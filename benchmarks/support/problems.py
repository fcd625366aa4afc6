"""Problems of an exact prompt length, and how long and how right the responses to them are, in every compared program alike."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.support.shapes import SHAPES, Shape, prompt_text, random_image, response_lengths

if TYPE_CHECKING:
    from cepo.models.processing import Processing

RIGHT, WRONG = "7", "8"
"""Every problem's answer, and what a wrong response says."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """How responses end. The same numbers for the same step, wherever they are asked for.

    Attributes:
        prompts: per step.
        dead_share: share of the prompts, rounded, whose responses are all wrong; in the others every second one is right.
    """

    shape: Shape
    prompts: int
    dead_share: float = 0.0

    def lengths(self, step: int) -> list[list[int]]:
        """Response tokens of each sample of each prompt."""
        size = self.shape.group_size
        flat = response_lengths(self.shape, self.prompts * size, seed=step)
        return [flat[start : start + size] for start in range(0, len(flat), size)]

    def is_right(self, prompt: int, sample: int) -> bool:
        return not self.is_dead(prompt) and sample % 2 == 0

    def is_dead(self, prompt: int) -> bool:
        return prompt < round(self.dead_share * self.prompts)

    def ending(self, processing: Processing, *, right: bool) -> list[int]:
        """The tokens a response ends with: an answer and the end of the turn."""
        return [*processing.encode_text(rf"\boxed{{{RIGHT if right else WRONG}}}"), processing.eos_token_ids[0]]


@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """The work of measured steps, which every compared program is told alike.

    Attributes:
        folder: for the model, the problems and the run.
        shape: a name in `SHAPES`.
        prompts, dead_share: see `Script`.
        lora_rank: 0 for full fine-tuning.
        micro_batch: rows that pass together in the update.
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
        """How the responses of these steps end."""
        return Script(shape=SHAPES[self.shape], prompts=self.prompts, dead_share=self.dead_share)


def write_problems(shape: Shape, file: Path, processing: Processing, *, count: int) -> Path:
    """A parquet file of Geo3k's form, each problem with an image of its own; an existing one of the same kind is kept."""
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
