"""Measures the accuracy of a model or a checkpoint on problems and benchmarks: plans, evaluates and writes the results."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cepo.config import RunConfig
from cepo.config.path_checks import check_model_and_data
from cepo.config.paths import located_data
from cepo.config.worker_schema import parts_of
from cepo.data.hub import require_hub_names
from cepo.errors import ConfigError
from cepo.evaluation.benchmark_names import NamedSource, named_source
from cepo.evaluation.protocols import Rules, rules_of
from cepo.evaluation.results import free_name
from cepo.files.safe_files import read_text
from cepo.files.trees import Tree
from cepo.hardware import require_usable_torch
from cepo.terminal.progress import Progress

if TYPE_CHECKING:
    from cepo.evaluation.statistics import Row
    from cepo.evaluation.tasks import Task
    from cepo.models.processing import Processing
    from cepo.trainer.sampling import RolloutSampler

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A checked command line."""

    config: RunConfig  # its model is the one that the engine loads first
    checkpoint: str | None
    actor: Path | None  # folder of trained weights to load into that model; None for the model's own
    sources: Sequence[NamedSource]  # of problems
    out: Path
    protocol: str | None
    rules: Rules

    def lines(self) -> Iterator[str]:
        from cepo.trainer.sampling import validation_settings

        data = self.config.data
        worker = self.config.worker
        settings = validation_settings(worker.rollout, data.max_response_length)
        yield f"model: {worker.actor.model.model_path}"
        yield f"trained weights: {self.actor or 'none (the model unchanged)'}"
        yield f"data: {', '.join(map(str, self.sources))}"
        if self.rules.is_lmms:
            yield "prompts: those of lmms-eval's reasoning tasks"
        yield f"format prompt: {data.format_prompt}"
        yield (
            f"sampling: {settings.num_samples} per problem, temperature {settings.temperature:g}, top_p {settings.top_p:g}, "
            f"top_k {settings.top_k}, presence penalty {settings.presence_penalty:g}, "
            f"at most {settings.max_response_length} tokens, seed {worker.rollout.seed}"
        )
        yield f"generator: {worker.rollout.name}"
        yield f"reward function: {worker.reward.reward_function}; benchmarks by their own rules"
        if self.rules.judge is not None:
            yield f"judge: {self.rules.judge['model']}"
        yield f"folder: {self.out}"


def make_plan(options: Mapping[str, str], config: RunConfig, actor: Path | None, *, name: str) -> Plan:
    """Checks the options of a command line without loading a model.

    `config` follows from the settings of `with_protocol`; `actor` is the folder of the checkpoint's weights if any. The
    results are written to `evaluations/<name>` if no folder is given.
    """
    override = config.worker.rollout.val_override_config
    if override.get("temperature") == 0 and override.get("n", config.worker.rollout.n) > 1:
        raise ConfigError("temperature=0 samples the same response n times; set n=1")
    written_sources = parts_of(options.get("data") or config.data.val_files or "")
    sources = [named_source(source) for source in written_sources if source.strip()]
    if not sources:
        raise ConfigError("there is nothing to evaluate on: give data=SOURCE; data.val_files is null")
    check_model_and_data(config.worker.actor.model.model_path, [source.source for source in sources])
    out = Path(options.get("out") or free_name(f"evaluations/{name}", lambda folder: Path(folder).exists()))
    if out.is_file():
        raise ConfigError(f"--out {out} is a file; give a new folder")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out {out} is not empty; give a new folder")
    return Plan(
        config=config,
        checkpoint=options.get("checkpoint"),
        actor=actor,
        sources=sources,
        out=out,
        protocol=options.get("protocol"),
        rules=rules_of(options),
    )


def evaluate(plan: Plan) -> Tree:
    """Evaluates the model as planned and writes the results; returns the content of evaluation.json."""
    from cepo.data.training_set import most_visuals
    from cepo.evaluation.results import GENERATIONS_FILE, write_results
    from cepo.evaluation.tasks import asker_of, engine, graded_rows
    from cepo.run_folder.writing import LineFile

    model = plan.config.worker.actor.model
    require_usable_torch()
    require_hub_names([("checkpoint", model.model_path)], [("data", source.source) for source in plan.sources])
    config, processing, tasks = _prepared(plan)
    benchmarks: Tree = {}
    plan.out.mkdir(parents=True, exist_ok=True)
    visuals = most_visuals(*(task.problems for task in tasks))
    with contextlib.ExitStack() as stack:
        samplers: dict[bool, RolloutSampler] = {}  # of benchmarks and of other data
        for of_benchmarks in {task.benchmark is not None for task in tasks}:
            samplers[of_benchmarks] = asker_of(config, processing, stack, plan.rules, of_benchmarks=of_benchmarks)
        generator = stack.enter_context(engine(config, processing, plan.actor, visuals))
        file = stack.enter_context(contextlib.closing(LineFile(plan.out / GENERATIONS_FILE)))
        for source, task in zip(plan.sources, tasks, strict=True):
            logger.info("%s: %d problems from %s", task.name, len(task.problems), source)
            rows: list[Row] = []
            sampler = samplers[task.benchmark is not None]
            with Progress(task.name, len(task.problems)) as progress:
                for row in graded_rows(task, config, sampler, generator, plan.rules, on_progress=progress.update):
                    file.append(row)
                    rows.append(row)
            benchmarks[task.name] = {"source": str(source), **_figures(task, rows, config, plan.rules)}
        return write_results(plan.out, _description(plan, config, generator.name), benchmarks)


def _prepared(plan: Plan) -> tuple[RunConfig, Processing, list[Task]]:
    """Returns the configuration without names of the built-in toy task, the processing, and all tasks, checked."""
    from cepo.evaluation.tasks import read_task
    from cepo.microgeo.world import with_embedded_world
    from cepo.models.processing import processing_of

    located = ",".join(located_data(source.source) for source in plan.sources)
    data = dataclasses.replace(plan.config.data, train_files=located, val_files=None)
    config = with_embedded_world(dataclasses.replace(plan.config, data=data))
    processing = processing_of(config)
    tasks: list[Task] = []
    for planned_source, path in zip(plan.sources, config.data.train_sources, strict=True):
        source = NamedSource(name=planned_source.name, source=path)
        names = [task.name for task in tasks]
        tasks.append(read_task(source, config, processing, plan.rules, names))
    return config, processing, tasks


def _figures(task: Task, rows: Sequence[Row], config: RunConfig, rules: Rules) -> Tree:
    """Returns what evaluation.json says of one source: what was graded how, and the statistics of `benchmark_figures`.

    Raises `RewardError` if the judge gave no verdict on any response.
    """
    from cepo.evaluation.statistics import benchmark_figures
    from cepo.evaluation.tasks import REWARD

    benchmark = task.benchmark
    graded = [row for row in rows if row["correct"] is not None]
    num_ungraded = 0 if rules.judge is not None else task.num_judged
    figures: Tree = {
        "benchmark": None if benchmark is None else benchmark.name,
        "num_left_out": sum(task.problems.skipped.values()),
        "num_without_judge": num_ungraded,
        "num_without_verdict": len(rows) - len(graded) if rules.judge is not None else 0,
        "reward_function": REWARD if benchmark else config.worker.reward.reward_function,
        **benchmark_figures(graded, has_variants=benchmark is not None and benchmark.has_variants),
    }
    return figures


def _description(plan: Plan, config: RunConfig, generator: str) -> Tree:
    from cepo.run_folder.environment import describe_software
    from cepo.trainer.sampling import validation_settings

    data = config.data
    return {
        "checkpoint": plan.checkpoint,
        "model": config.worker.actor.model.model_path,
        "generator": generator,
        "dtype": config.worker.rollout.dtype,
        "seed": config.worker.rollout.seed,
        "protocol": plan.protocol,
        "judge": None if plan.rules.judge is None else plan.rules.judge["model"],
        "sampling": dataclasses.asdict(validation_settings(config.worker.rollout, config.data.max_response_length)),
        "format_prompt": None if data.format_prompt is None else read_text(Path(data.format_prompt)),
        "max_prompt_length": data.max_prompt_length,
        "min_pixels": data.min_pixels,
        "max_pixels": data.max_pixels,
        **describe_software(),
    }
