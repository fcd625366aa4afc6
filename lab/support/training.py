"""Implements a measured process of this package's training: whole steps on request, with scripted responses.

    python -m lab.support.training OPTIONS-AS-JSON

Everything runs as in `cepo train`, except that sampled tokens are replaced where the script says that a response ends.
Compared runs therefore have the same lengths and verdicts at every step, whatever their weights are.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.support.machine import ROOT
from lab.support.model_flops import ModelFlops
from lab.support.paired import Record, serve
from lab.support.problems import Script, WorkOptions, write_problems
from testing.shapes import SHAPES, write_checkpoint

if TYPE_CHECKING:
    from cepo.config import RunConfig
    from cepo.models.processing import Processing
    from cepo.trainer.batches import ScoredBatch
    from cepo.trainer.loop import Trainer

HINT_ROOM = 64
"""The largest number of tokens by which a teacher's context is longer than the prompt."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(WorkOptions):
    """The work of a measured training of this package, and its own options.

    Attributes:
        method: the estimator's name.
        run: name of the run's folder; by default the method's.
        score_all: score live rows before the update even if the update starts from the weights that sampled them.
        overrides: further `a.b.c=value` settings, which take precedence.
    """

    method: str
    run: str = ""
    score_all: bool = False
    overrides: list[str] = field(default_factory=list)


def settings(options: TrainingOptions, model: Path, problems: Path) -> list[str]:
    """Returns the command line of the run."""
    shape, actor = SHAPES[options.shape], "worker.actor"
    return [
        f"config={ROOT}/configs/microgeo/base.yaml",
        f"data.train_files={problems}",
        "data.val_files=null",
        "data.format_prompt=null",
        "data.shuffle=false",
        f"data.max_prompt_length={shape.prompt_tokens + HINT_ROOM}",
        f"data.max_response_length={shape.longest}",
        f"data.rollout_batch_size={options.prompts}",
        f"algorithm.adv_estimator={options.method}",
        f"{actor}.global_batch_size={options.prompts}",
        f"{actor}.micro_batch_size_per_device_for_update={options.micro_batch}",
        f"{actor}.micro_batch_size_per_device_for_experience={options.micro_batch}",
        f"{actor}.model.model_path={model}",
        f"{actor}.model.enable_gradient_checkpointing={str(options.gradient_checkpointing).lower()}",
        f"{actor}.model.lora.rank={options.lora_rank}",
        f"{actor}.model.lora.alpha={2 * max(1, options.lora_rank)}",
        f"{actor}.optim.lr=1.0e-6",
        "worker.rollout.name=transformers",
        f"worker.rollout.n={shape.group_size}",
        f"trainer.max_steps={options.steps}",
        "trainer.logger=[file]",
        "trainer.val_before_train=false",
        "trainer.find_last_checkpoint=false",
        f"trainer.save_checkpoint_path={Path(options.folder) / ('run-' + (options.run or options.method))}",
        *options.overrides,
    ]


@contextmanager
def scripted_generation(script: Script, processing: Processing) -> Iterator[None]:
    """Makes the transformers generator of runs that are built inside end its responses as the script says."""
    import torch

    from cepo.rollout import transformers_generator as module

    plain_generator = module.TransformersGenerator
    plain_draw = module.draw_tokens
    endings = {right: script.ending(processing, right=right) for right in (False, True)}
    stand_in = int(processing.encode_text("0")[0])
    ends = torch.tensor(processing.eos_token_ids)
    places: dict[int, tuple[int, int]] = {}  # prompt and sample of a row, by the identity of its list of tokens
    lengths: list[list[int]] = []  # of the current call's responses, by prompt and sample

    class Scripted(plain_generator):
        calls = -1

        def generate(self, requests: Any, settings: Any, on_finished: Any = None) -> Any:
            self.calls += 1
            places.clear()
            lengths[:] = script.lengths(self.calls)
            return super().generate(requests, settings, on_finished)

        def _rows(self, requests: Any, settings: Any) -> Iterator[Any]:
            for number, row in enumerate(super()._rows(requests, settings)):
                places[id(row.tokens)] = (row.request, number % settings.num_samples)
                yield row

    def scripted_draw(logits: Any, outputs: Sequence[list[int]], *arguments: Any) -> Any:
        tokens = plain_draw(logits, outputs, *arguments)
        tokens[torch.isin(tokens, ends.to(tokens.device))] = stand_in
        for row, output in enumerate(outputs):
            prompt, sample = places[id(output)]
            ending = endings[script.is_right(prompt, sample)]
            position = len(output) + len(ending) - lengths[prompt][sample]  # within the ending
            if 0 <= position < len(ending):
                tokens[row] = ending[position]
        return tokens

    module.TransformersGenerator = Scripted
    module.draw_tokens = scripted_draw
    try:
        yield
    finally:
        module.TransformersGenerator = plain_generator
        module.draw_tokens = plain_draw


class MeasuredTraining:
    """A trainer that counts the work of its steps."""

    def __init__(self, options: TrainingOptions, stack: ExitStack) -> None:
        from cepo.config import check_config, load_config
        from cepo.models.processing import Processing
        from cepo.train import build_trainer

        shape = SHAPES[options.shape]
        folder = Path(options.folder)
        model = write_checkpoint(shape, folder / "models" / shape.name)
        processing = Processing(str(model))
        problems = write_problems(shape, folder / f"{shape.name}.parquet", processing, count=4 * options.prompts)
        config = load_config(settings(options, model, problems))
        check_config(config)
        self.script = options.script
        self.config: RunConfig = config
        stack.enter_context(scripted_generation(self.script, processing))
        self.trainer: Trainer = build_trainer(config, stack)
        self._metrics: Mapping[str, float] = {}
        self._batch: ScoredBatch | None = None
        self._observe()
        if options.score_all:
            self._score_all()

    def _score_all(self) -> None:
        import torch

        trainer: Any = self.trainer
        assert hasattr(trainer, "_on_policy_rows"), "the trainer decides elsewhere which rows need no scoring"
        trainer._on_policy_rows = lambda rollouts: torch.zeros(len(rollouts.generations), dtype=torch.bool)

    def step(self, number: int) -> Record:
        """Performs one training step and returns its record."""
        start, processor_start = time.perf_counter(), time.process_time()
        self.trainer.train_step(number)
        seconds, processor_seconds = time.perf_counter() - start, time.process_time() - processor_start
        metrics = self._metrics
        stages = {
            name.partition("/")[2]: value
            for name, value in metrics.items()
            if name.startswith("timing_s/") and name != "timing_s/step"
        }
        tokens = {name.partition("/")[2]: value for name, value in metrics.items() if name.startswith("tokens/")}
        return {
            "seconds": seconds,
            "processor_seconds": processor_seconds,
            "stages": stages,
            "tokens": tokens,
            "flops": self._flops(),
            "counts": {
                "responses": len(self._its_batch.rollouts.generations),
                "live_rows": int(self._its_batch.plan.live.sum()),
                "teacher_rows": metrics.get("work/teacher_rows", 0.0),
                **{name: value for name, value in metrics.items() if name.startswith("work/tokens_")},
            },
            "active": self.trainer.estimator.needs_teacher(step=number),
        }

    @property
    def _its_batch(self) -> ScoredBatch:
        assert self._batch is not None, "a step was taken"
        return self._batch

    def _observe(self) -> None:
        trainer: Any = self.trainer
        record, log_metrics = trainer.record, trainer.tracker.log_metrics

        def observing_record(batch: ScoredBatch, signal: Any, updated: Any) -> None:
            self._batch = batch
            record(batch, signal, updated)

        def observing_log(step: int, values: Mapping[str, float]) -> None:
            self._metrics = dict(values)
            log_metrics(step, values)

        trainer.record, trainer.tracker.log_metrics = observing_record, observing_log

    def _flops(self) -> dict[str, float]:
        """The operations of the plain path: every row with its own context, the image once per group and pass."""
        batch, shape = self._its_batch, self.script.shape
        costs = ModelFlops(shape, self.config.worker.actor.model.lora.rank)
        size = batch.rollouts.group_size
        lengths = [len(generation.response_ids) for generation in batch.rollouts.generations]
        groups = [lengths[start : start + size] for start in range(0, len(lengths), size)]
        live = batch.plan.live.tolist()
        live_groups = [
            [length for length, alive in zip(group, live[start : start + size], strict=True) if alive]
            for start, group in zip(range(0, len(lengths), size), groups, strict=True)
        ]
        live_groups = [group for group in live_groups if group]
        prompt, checkpointing = shape.prompt_tokens, self.config.worker.actor.model.enable_gradient_checkpointing
        # Rows whose log-probs are not needed are not scored.
        live_tokens = sum(prompt + length for group in live_groups for length in group)
        scored = self._metrics.get("tokens/score", 0.0) / live_tokens if live_tokens else 0.0
        found = {
            "generate": float(sum(costs.generate(prompt, group) for group in groups)),
            "score": scored * sum(costs.score(prompt, group) for group in live_groups),
            "update": float(sum(costs.update(prompt, group, checkpointing=checkpointing) for group in live_groups)),
        }
        rows = self._metrics.get("work/teacher_rows", 0.0)
        if rows:
            passes = rows / sum(map(len, live_groups))
            responses = passes * sum(map(sum, live_groups))
            context = round((self._metrics["tokens/teachers"] - responses) / rows)
            found["teachers"] = passes * sum(costs.score(context, group) for group in live_groups)
        return found


def main() -> None:
    """Serves steps of the training described by the first argument."""
    options = TrainingOptions(**json.loads(sys.argv[1]))
    with ExitStack() as stack:
        training = MeasuredTraining(options, stack)
        training.trainer.backend.synchronise_rollout()
        serve(training.step)


if __name__ == "__main__":
    main()
