"""Measures the accuracy of a model or a checkpoint on problems and benchmarks: plans, evaluates and writes the results."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cepo.config import RunConfig
from cepo.config.paths import check_model_and_data, located_data
from cepo.data.hub import require_hub_names
from cepo.errors import ConfigError
from cepo.foreign_files import read_text
from cepo.hardware import require_usable_torch
from cepo.progress import Progress
from cepo.trees import Tree

if TYPE_CHECKING:
    from cepo.evaluation.run import Task
    from cepo.models.processing import Processing


logger = logging.getLogger(__name__)
_PAPER_SAMPLING = {"n": "1", "temperature": "1", "top_p": "1", "top_k": "40", "presence_penalty": "2"}
"""The sampling settings of `protocol=paper`, from the paper's section on experiments."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A checked command line."""

    config: RunConfig  # its model is the one that the engine loads first
    checkpoint: str | None
    actor: Path | None  # folder of trained weights to load into that model; None for the model's own
    sources: Sequence[str]  # of problems, as the user named them
    out: Path

    def lines(self) -> Iterator[str]:
        from cepo.trainer.asking import validation_settings

        data, worker = self.config.data, self.config.worker
        settings = validation_settings(worker.rollout, data)
        yield f"model: {worker.actor.model.model_path}"
        yield f"trained weights: {self.actor or 'none (the model unchanged)'}"
        yield f"data: {', '.join(self.sources)}"
        yield f"format prompt: {data.format_prompt}"
        yield (
            f"sampling: {settings.num_samples} per problem, temperature {settings.temperature:g}, top_p {settings.top_p:g}, "
            f"top_k {settings.top_k}, presence penalty {settings.presence_penalty:g}, "
            f"at most {settings.max_response_length} tokens, seed {worker.rollout.seed}"
        )
        yield f"generator: {worker.rollout.name}"
        yield f"reward function: {worker.reward.reward_function}; benchmarks by their own rules"
        yield f"folder: {self.out}"


def with_sampling(options: Mapping[str, str], settings: Sequence[str]) -> list[str]:
    """Returns the settings of a command line, with those that its options are short for."""
    protocol = _PAPER_SAMPLING if "protocol" in options else {}
    sampling = {**protocol, **options}
    length = ["data.max_response_length=32000"] if protocol else []
    chosen = [f"worker.rollout.val_override_config.{key}={sampling[key]}" for key in _PAPER_SAMPLING if key in sampling]
    return [*length, *settings, *chosen]


def make_plan(options: Mapping[str, str], config: RunConfig, actor: Path | None, *, name: str) -> Plan:
    """Checks the options of a command line without loading a model.

    `config` follows from the settings of `with_sampling`; `actor` is the folder of the checkpoint's weights if any. The
    results are written to `evaluations/<name>` if no folder is given.
    """
    checkpoint = options.get("checkpoint")
    override = config.worker.rollout.val_override_config
    if override.get("temperature") == 0 and override.get("n", config.worker.rollout.n) > 1:
        raise ConfigError("temperature=0 samples the same response n times; set n=1")
    sources = [name for name in (options.get("data") or config.data.val_files or "").split(",") if name]
    if not sources:
        raise ConfigError("there is nothing to evaluate on: give data=SOURCE; data.val_files is null")
    check_model_and_data(config.worker.actor.model.model_path, sources)
    folders = (Path("evaluations") / (f"{name}-{number}" if number > 1 else name) for number in itertools.count(1))
    out = Path(options["out"]) if "out" in options else next(folder for folder in folders if not folder.exists())
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} is not empty; give a new folder")
    return Plan(config=config, checkpoint=checkpoint, actor=actor, sources=sources, out=out)


def evaluate(plan: Plan) -> Tree:
    """Evaluates the model as planned and writes the results; returns the content of evaluation.json."""
    from cepo.data.training_set import most_visuals
    from cepo.evaluation.results import GENERATIONS_FILE, write_results
    from cepo.evaluation.run import REWARD, asker_of, engine, graded_rows
    from cepo.evaluation.statistics import benchmark_figures
    from cepo.tracking.run_folder import LineFile

    model = plan.config.worker.actor.model
    require_usable_torch()
    require_hub_names([("checkpoint", model.model_path)], [("data", source) for source in plan.sources])
    config, processing, tasks = _prepared(plan)
    benchmarks: Tree = {}
    plan.out.mkdir(parents=True, exist_ok=True)
    visuals = most_visuals(*(task.problems for task in tasks))
    with contextlib.ExitStack() as stack:
        askers = {
            of_benchmarks: asker_of(config, processing, stack, of_benchmarks=of_benchmarks)
            for of_benchmarks in {task.benchmark is not None for task in tasks}
        }
        generator = stack.enter_context(engine(config, processing, plan.actor, visuals))
        file = stack.enter_context(contextlib.closing(LineFile(plan.out / GENERATIONS_FILE)))
        for source, task in zip(plan.sources, tasks, strict=True):
            logger.info("%s: %d problems from %s", task.name, len(task.problems), source)
            rows, asker = [], askers[task.benchmark is not None]
            with Progress(task.name, len(task.problems)) as progress:
                for row in graded_rows(task, config, asker, generator, on_progress=progress.update):
                    file.append(row)
                    rows.append(row)
            benchmarks[task.name] = {
                "source": source,
                "num_left_out": sum(task.problems.skipped.values()),
                "reward_function": REWARD if task.benchmark else config.worker.reward.reward_function,
                **benchmark_figures(rows, has_variants=task.benchmark is not None and task.benchmark.has_variants),
            }
        return write_results(plan.out, _description(plan, config, generator.name), benchmarks)


def _prepared(plan: Plan) -> tuple[RunConfig, Processing, list[Task]]:
    """Returns the configuration without names of the embedded world, the processing, and all tasks, checked."""
    from cepo.evaluation.run import read_task
    from cepo.microgeo.world import with_embedded_world
    from cepo.models.processing import load_processing

    located = ",".join(located_data(source.strip()) for source in plan.sources)
    data = dataclasses.replace(plan.config.data, train_files=located, val_files=None)
    config = with_embedded_world(dataclasses.replace(plan.config, data=data))
    processing = load_processing(config.worker.actor.model, config.data)
    tasks: list[Task] = []
    for source in config.data.train_sources:
        tasks.append(read_task(source, config, processing, [task.name for task in tasks]))
    return config, processing, tasks


def _description(plan: Plan, config: RunConfig, generator: str) -> Tree:
    from cepo.tracking.run_folder import describe_software
    from cepo.trainer.asking import validation_settings

    data = config.data
    return {
        "checkpoint": plan.checkpoint,
        "model": config.worker.actor.model.model_path,
        "generator": generator,
        "dtype": config.worker.rollout.dtype,
        "seed": config.worker.rollout.seed,
        "sampling": dataclasses.asdict(validation_settings(config.worker.rollout, config.data)),
        "format_prompt": None if data.format_prompt is None else read_text(Path(data.format_prompt)),
        "max_prompt_length": data.max_prompt_length,
        "min_pixels": data.min_pixels,
        "max_pixels": data.max_pixels,
        **describe_software(),
    }
