"""Reads problems, those of known benchmarks among them, and samples and grades responses with a checkpoint's weights."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cepo.algorithms.settings import TeacherConfig
from cepo.config import RunConfig
from cepo.config.paths import split_source
from cepo.data.dataset import ProblemSet
from cepo.data.prompts import ContextBuilder, Problem
from cepo.data.row_settings import RowRules
from cepo.errors import ConfigError, DataError
from cepo.evaluation.benchmark_names import NamedSource, is_name
from cepo.evaluation.benchmarks import Benchmark, converted, opened
from cepo.evaluation.protocols import Rules
from cepo.evaluation.results import free_name
from cepo.files.temp_folders import OwnFolder
from cepo.files.trees import Tree
from cepo.models.pretrained import read_quantization
from cepo.models.processing import Processing
from cepo.rewards.benchmark import JUDGED, final_answer, kind_of
from cepo.rewards.pool import RewardPool
from cepo.rollout.factory import build_generator, settings_of_run
from cepo.rollout.generator import AdapterWeights, Generator
from cepo.run_folder.pictures import thumbnail
from cepo.trainer.rollouts import Rollouts
from cepo.trainer.sampling import VALIDATION_STEP, RolloutSampler, validation_settings
from cepo.workers.checkpoint import ADAPTER
from cepo.workers.distributed import this_device
from cepo.workers.merged_model import ADAPTER_CONFIG, BaseModel, merge_checkpoint, read_adapter

logger = logging.getLogger(__name__)
REWARD = "cepo/rewards/benchmark.py:compute_score"
"""The reward function of benchmarks; other data is graded by `worker.reward.reward_function`."""
_JUDGE_SECONDS = 600.0
"""The least time limit of a call for up to 32 verdicts of a judge, each of which takes up to a minute."""
_PROBLEMS_AT_ONCE = 256
"""The number of problems per batch, enough to keep an engine busy. A batch is graded and written before the next."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One source of problems to evaluate, by its name in the results; `benchmark` is the known one whose format it has."""

    name: str
    problems: ProblemSet
    benchmark: Benchmark | None
    num_judged: int = 0  # rows of the source that only a judge can grade


def read_task(
    source: NamedSource, config: RunConfig, processing: Processing, rules: Rules, taken_names: Collection[str] = ()
) -> Task:
    """Reads the problems of `source`; raises as `opened`, `converted` and `ProblemSet`.

    The name is the benchmark's, or the source's without folders and extension, with a number if it is among `taken_names`. Raises
    `ConfigError` if lmms-eval's protocol is asked for data that is no benchmark, and `DataError` if no row can be graded.
    """
    data = config.data
    cells = RowRules.of(data).cells
    rows, benchmark = opened(source, cells)
    num_judged = 0
    if benchmark is None:
        if rules.is_lmms:
            raise ConfigError(
                f"protocol=lmms defines the prompts of benchmarks, and {source} is read by data.prompt_key; name its "
                f"benchmark (NAME:{source}) or evaluate it without protocol=lmms"
            )
        problems = ProblemSet(source.source, data, processing)
        name = _own_name(source.source)
    else:
        converted_data = dataclasses.replace(data, prompt_key="problem", answer_key="answer", image_key="images")
        prepared = converted(rows, benchmark, source.source, skip_bad_rows=data.skip_bad_rows, is_lmms=rules.is_lmms)
        num_judged = sum(problem["answer_kind"] == JUDGED for problem in prepared)
        if num_judged == len(prepared) and rules.judge is None:
            raise DataError(
                f"{source}: each of its {num_judged} rows needs a judge; give judge=ADDRESS judge_model=MODEL of an "
                "OpenAI-compatible server"
            )
        problems = ProblemSet(source.source, converted_data, processing, rows=prepared)
        name = benchmark.name
    return Task(
        name=free_name(name, lambda taken: taken in taken_names),
        problems=problems,
        benchmark=benchmark,
        num_judged=num_judged,
    )


def _own_name(source: str) -> str:
    """Returns the name of a user's own data, which is never that of a benchmark."""
    path, split = split_source(source)
    suffix = "" if split is None else f"@{split}"
    name = f"{Path(path).stem}{suffix}"
    return f"{name} (own)" if is_name(name) else name


def graded_rows(
    task: Task,
    config: RunConfig,
    sampler: RolloutSampler,
    generator: Generator,
    rules: Rules,
    *,
    on_progress: Callable[[int], None],
) -> Iterator[Tree]:
    """Yields one row per response, in the problems' order; calls `on_progress` with the number of finished problems.

    A row has `benchmark`, `problem_id` (the row's number in the source), `cluster`, `kind`, `choices` (the options'
    texts), `categories`, `sample`, `problem`, `image` (small, with the first sample), `ground_truth`,
    `response`, `answer` (as extracted, or None), `correct` (None if only a judge can tell and there is no verdict),
    `length` in tokens, `finished` and `scores`.
    """
    settings = validation_settings(config.worker.rollout, config.data.max_response_length)
    size = config.data.val_batch_size if config.data.val_batch_size > 0 else _PROBLEMS_AT_ONCE
    for start in range(0, len(task.problems), size):
        batch: Sequence[Problem] = task.problems[start : start + size]
        problems = [problem for problem in batch if rules.judge is not None or not _is_judged(task, problem)]
        if problems:
            rollouts = sampler.sample(problems, generator, settings, step=VALIDATION_STEP)
            answers = None if task.benchmark else sampler.answers(rollouts)
            for number in range(len(problems)):
                yield from _rows_of_problem(task, rollouts, number, answers, rules)
        on_progress(len(batch))


def _is_judged(task: Task, problem: Problem) -> bool:
    return task.benchmark is not None and problem.columns["answer_kind"] == JUDGED


def _rows_of_problem(
    task: Task, rollouts: Rollouts, number: int, answers: Sequence[str | None] | None, rules: Rules
) -> Iterator[Tree]:
    """Yields the rows of one problem; `answers` are those found by the user's own function, None for a benchmark."""
    problem = rollouts.problems[number]
    columns = problem.columns if task.benchmark else {}
    kind = columns.get("answer_kind") or kind_of(problem.ground_truth)
    choices: list[str] = list(columns.get("choices") or ())
    categories: dict[str, list[str]] = columns.get("categories") or {}
    for sample, row in enumerate(rollouts.rows_of(number)):
        generation = rollouts.generations[row]
        response = rollouts.responses[row]
        is_graded = kind != JUDGED or bool(rollouts.scores[row].get("judged"))
        answer = final_answer(response, kind, choices, first_tag=rules.is_lmms) if answers is None else answers[row]
        yield {
            "benchmark": task.name,
            "problem_id": problem.prompt_id,
            "cluster": columns.get("cluster", problem.prompt_id),
            "kind": kind,
            "choices": choices,
            "categories": {name: values for name, values in categories.items() if values},
            "sample": sample,
            "problem": problem.text,
            "image": thumbnail(problem.images) if sample == 0 else None,
            "ground_truth": problem.ground_truth,
            "response": response,
            "answer": answer,
            "correct": bool(rollouts.correct[row]) if is_graded else None,
            "length": len(generation.response_ids),
            "finished": generation.finished,
            "scores": rollouts.scores[row],
        }


def asker_of(
    config: RunConfig, processing: Processing, stack: contextlib.ExitStack, rules: Rules, *, of_benchmarks: bool
) -> RolloutSampler:
    """Returns an `RolloutSampler` that builds prompts like the config's validation, and rewards like it, or as benchmarks are."""
    reward = config.worker.reward
    algorithm = config.algorithm
    if of_benchmarks:
        least_seconds = 0.0 if rules.judge is None else _JUDGE_SECONDS
        reward = dataclasses.replace(
            reward,
            reward_function=REWARD,
            reward_function_kwargs={"first_tag": rules.is_lmms, "judge": rules.judge},
            reward_weights=None,
            answer_function=None,
            timeout_seconds=max(reward.timeout_seconds, least_seconds),
        )
        # What the user's own reward calls correct says nothing of a benchmark's.
        algorithm = dataclasses.replace(algorithm, correct_key="accuracy", correct_threshold=0.5)
    contexts = ContextBuilder(processing, TeacherConfig(), max_context_length=config.data.max_prompt_length)
    return RolloutSampler(config.worker, algorithm, contexts, processing, stack.enter_context(RewardPool(reward)))


@contextlib.contextmanager
def engine(
    config: RunConfig, processing: Processing, actor: Path | None, most_visuals: tuple[int, int]
) -> Iterator[Generator]:
    """Yields a generator with the weights of a checkpoint's `actor` folder; without one, with the model's own."""
    adapter = None if actor is None else adapter_of(actor)
    with contextlib.ExitStack() as stack:
        settings_of_training = settings_of_run(
            config.data, config.worker, num_devices=config.trainer.num_devices, most_visuals=most_visuals
        )
        model_path = settings_of_training.model_path
        if actor is not None and adapter is None:
            model_path = _merged(actor, config, stack)
        settings = dataclasses.replace(
            settings_of_training,
            model_path=model_path,
            lora_rank=0 if adapter is None else int(str(adapter.adapter_config["r"])),
            max_num_batched_tokens=max(
                config.worker.rollout.max_num_batched_tokens, settings_of_training.max_model_len
            ),
            max_num_seqs=config.worker.rollout.max_num_seqs,  # the default is for the batches of the run
            tensor_parallel_size=1,
            sleep=False,
            disable_tqdm=True,  # the command draws a bar over problems
        )
        generator = build_generator(settings, processing, device=this_device().type)
        stack.callback(generator.close)
        if adapter is not None:
            generator.sync_weights(adapter)
        yield generator


def adapter_of(actor: Path) -> AdapterWeights | None:
    """Returns the checkpoint's adapter; None if it must be merged (DoRA, 4-bit base) or if all weights were trained."""
    folder = actor / ADAPTER
    if not (folder / ADAPTER_CONFIG).is_file() or read_quantization(folder) is not None:
        return None
    adapter = read_adapter(folder)
    return None if adapter.adapter_config.get("use_dora") else adapter


def _merged(actor: Path, config: RunConfig, stack: contextlib.ExitStack) -> str:
    model = config.worker.actor.model
    folder = stack.enter_context(OwnFolder("evaluate")) / "model"
    base = BaseModel(
        path=model.model_path,
        tokenizer_path=model.tokenizer_path,
        override_config=model.override_config,
        trust_remote_code=model.trust_remote_code,
    )
    merge_checkpoint(actor, folder, base, dtype=config.worker.rollout.dtype)
    return str(folder)
