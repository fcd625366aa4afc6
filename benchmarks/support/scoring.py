"""Implements a measured process that scores responses, one point of a grid per requested step.

Run it with `python -m benchmarks.support.scoring OPTIONS-AS-JSON`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.support.model_flops import ModelFlops
from benchmarks.support.paired import Record, serve
from benchmarks.support.problems import write_problems
from benchmarks.support.shapes import SHAPES, Shape, prompt_text, random_image, write_checkpoint
from benchmarks.support.training import TrainingOptions, settings

if TYPE_CHECKING:
    from cepo.data.batch import ScoringRow
    from cepo.models.inputs import EncodedPrompt
from cepo.models.processing import Processing

HINT_TOKENS = 20
"""The number of tokens by which a teacher's context is longer than the prompt."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """The sizes of what is scored: every response of one group with every context."""

    group_size: int
    response: int
    prompt: int
    contexts: int

    @property
    def rows(self) -> int:
        return self.group_size * self.contexts


@dataclass(frozen=True, kw_only=True)
class ScoringOptions:
    """The options of the process; `points` are mappings, in the order of the steps."""

    folder: str
    shape: str
    method: str
    points: list[dict[str, int]]
    run: str
    micro_batch: int = 8
    lora_rank: int = 16
    overrides: list[str] = field(default_factory=list)


def rows_of(point: Point, shape: Shape, processing: Processing) -> list[ScoringRow]:
    """Returns random responses with the prompt, and with each hint after it; all contexts share prompt and image."""
    import numpy

    from cepo.data.batch import ScoringRow

    shape = dataclasses.replace(shape, prompt_tokens=point.prompt)
    images = processing.load_images([random_image(shape, 0)])
    text = prompt_text(shape, processing, 0)
    contexts: list[EncodedPrompt] = [processing.encode(text, images)]
    for hint in range(1, point.contexts):
        contexts.append(processing.encode(text + str(hint) * HINT_TOKENS, images))
    digits = processing.encode_text("0123456789")
    draws = numpy.random.default_rng(0).integers(0, len(digits), (point.group_size, point.response))
    responses = [tuple(digits[place] for place in row) for row in draws.tolist()]
    return [ScoringRow(context=context, response_ids=response) for context in contexts for response in responses]


class MeasuredScoring:
    """The scoring pass of a run's backend."""

    def __init__(self, options: ScoringOptions, stack: ExitStack) -> None:
        from cepo.config import load_config
        from cepo.models.processing import Processing
        from cepo.train import build_trainer

        self.points = [Point(**point) for point in options.points]
        longest_prompt = max(point.prompt for point in self.points)
        self.shape = dataclasses.replace(
            SHAPES[options.shape],
            prompt_tokens=longest_prompt,
            longest=max(point.response for point in self.points),
        )
        folder = Path(options.folder)
        model = write_checkpoint(SHAPES[options.shape], folder / "models" / self.shape.name)
        self.processing = Processing(str(model))
        problems = write_problems(SHAPES[options.shape], folder / "problems.parquet", self.processing, count=4)
        told = TrainingOptions(
            folder=options.folder,
            shape=options.shape,
            method=options.method,
            prompts=1,
            steps=1,
            lora_rank=options.lora_rank,
            micro_batch=options.micro_batch,
            run=options.run,
            overrides=[
                f"data.max_prompt_length={longest_prompt + HINT_TOKENS}",
                f"data.max_response_length={self.shape.longest}",
                *options.overrides,
            ],
        )
        self.backend: Any = build_trainer(load_config(settings(told, model, problems)), stack).backend
        self.costs = ModelFlops(self.shape, options.lora_rank)

    def step(self, number: int) -> Record:
        """Scores point `number`; the record has the sum of all log-probs, by which sides can be compared."""
        point = self.points[number % len(self.points)]
        rows = rows_of(point, self.shape, self.processing)
        start, processor_start = time.perf_counter(), time.process_time()
        log_probs = self.backend.score(rows)
        seconds, processor_seconds = time.perf_counter() - start, time.process_time() - processor_start
        self.backend.finish_step(0)
        responses = [point.response] * point.group_size
        contexts = [point.prompt + (HINT_TOKENS if view else 0) for view in range(point.contexts)]
        return {
            "point": asdict(point),
            "seconds": seconds,
            "processor_seconds": processor_seconds,
            "tokens": {"score": sum(row.num_tokens for row in rows), "responses": point.rows * point.response},
            "flops": {"score": float(sum(self.costs.score(context, responses) for context in contexts))},
            "sum_of_log_probs": float(sum(each.sum() for each in log_probs)),
        }


def main() -> None:
    """Serves the points described by the first argument, repeatedly."""
    options = ScoringOptions(**json.loads(sys.argv[1]))
    with ExitStack() as stack:
        serve(MeasuredScoring(options, stack).step)


if __name__ == "__main__":
    main()
