"""Reads problems, those of known benchmarks among them, and samples and grades responses with a checkpoint's weights."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from cepo.algorithms.settings import TeacherConfig
from cepo.config import RunConfig
from cepo.data.contexts import ContextBuilder
from cepo.data.dataset import ProblemSet
from cepo.data.reading import read_source
from cepo.evaluation.benchmarks import Benchmark, converted, recognise
from cepo.leftovers import OwnFolder
from cepo.models.pretrained import read_quantization
from cepo.models.processing import Processing
from cepo.rewards.benchmark import kind_of, read_answer
from cepo.rewards.pool import RewardPool
from cepo.rollout.factory import build_generator, settings_of_run
from cepo.rollout.generator import AdapterWeights, Generator
from cepo.tracking.run_folder import thumbnail
from cepo.trainer.asking import VALIDATION_STEP, Asker, validation_settings
from cepo.trees import Tree
from cepo.workers.checkpoint import ADAPTER
from cepo.workers.distributed import this_device
from cepo.workers.merged_model import ADAPTER_CONFIG, BaseModel, merge_checkpoint, read_adapter

logger = logging.getLogger(__name__)
REWARD = "cepo/rewards/benchmark.py:compute_score"
"""The reward function of benchmarks; other data is graded by `worker.reward.reward_function`."""
_PROBLEMS_AT_ONCE = 256
"""The number of problems per batch, enough to keep an engine busy. A batch is graded and written before the next."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One source of problems to evaluate, by its name in the results; `benchmark` is the known one whose format it has."""

    name: str
    problems: ProblemSet
    benchmark: Benchmark | None


def read_task(source: str, config: RunConfig, processing: Processing, taken: Collection[str] = ()) -> Task:
    """Reads the problems of `source`, as a benchmark if it has the columns of one; raises as `ProblemSet`.

    The name is the benchmark's, or the source's without folders and extension, with a number if it is `taken`.
    """
    data = config.data
    rows = read_source(source, text_columns=(data.prompt_key, data.answer_key))
    benchmark = None if {data.prompt_key, data.answer_key} <= set(rows.column_names) else recognise(rows.column_names)
    if benchmark is None:
        problems = ProblemSet(source, data, processing)
        path, at, split = source.partition("@")
        name = f"{Path(path).stem}{at}{split}"
    else:
        logger.info("%s has the columns of %s", source, benchmark.name)
        keys = dataclasses.replace(data, prompt_key="problem", answer_key="answer", image_key="images")
        problems, name = ProblemSet(source, keys, processing, rows=converted(rows, benchmark)), benchmark.name
    names = [name, *(f"{name}-{number}" for number in range(2, len(taken) + 2))]
    return Task(name=next(each for each in names if each not in taken), problems=problems, benchmark=benchmark)


def graded_rows(
    task: Task, config: RunConfig, asker: Asker, generator: Generator, *, on_progress: Callable[[int], None]
) -> Iterator[Tree]:
    """Yields one row per response, in the problems' order; calls `on_progress` with the number of finished problems.

    A row has `benchmark`, `problem_id` (the row's number in the source), `cluster`, `kind`, `choices` (the options'
    texts), `sample`, `problem`, `image` (small, with the first sample), `ground_truth`, `response`, `answer` (as
    extracted, or None), `correct`, `length` in tokens, `finished` and `scores`.
    """
    size = config.data.val_batch_size if config.data.val_batch_size > 0 else _PROBLEMS_AT_ONCE
    for start in range(0, len(task.problems), size):
        problems = task.problems[start : start + size]
        settings = validation_settings(config.worker.rollout, config.data)
        rollouts = asker.ask(problems, generator, settings, step=VALIDATION_STEP)
        answers = [] if task.benchmark else asker.answers(rollouts)
        for number, problem in enumerate(problems):
            columns = problem.columns if task.benchmark else {}
            kind = columns.get("answer_kind") or kind_of(problem.ground_truth)
            for sample, row in enumerate(rollouts.rows_of(number)):
                one, response = rollouts.generations[row], rollouts.responses[row]
                yield {
                    "benchmark": task.name,
                    "problem_id": problem.prompt_id,
                    "cluster": columns.get("cluster", problem.prompt_id),
                    "kind": kind,
                    "choices": list(columns.get("choices") or ()),
                    "sample": sample,
                    "problem": problem.text,
                    "image": thumbnail(problem.images) if sample == 0 else None,
                    "ground_truth": problem.ground_truth,
                    "response": response,
                    "answer": read_answer(response, kind, columns["choices"]) if task.benchmark else answers[row],
                    "correct": bool(rollouts.correct[row]),
                    "length": len(one.response_ids),
                    "finished": one.finished,
                    "scores": rollouts.scores[row],
                }
        on_progress(len(problems))


def asker_of(config: RunConfig, processing: Processing, stack: contextlib.ExitStack, *, of_benchmarks: bool) -> Asker:
    """Returns an `Asker` that builds prompts like the config's validation, and rewards like it, or as benchmarks are."""
    reward = config.worker.reward
    if of_benchmarks:
        own = {"reward_function": REWARD, "reward_function_kwargs": {}, "reward_weights": None, "answer_function": None}
        reward = dataclasses.replace(reward, **own)
    contexts = ContextBuilder(processing, TeacherConfig(), max_context_length=config.data.max_prompt_length)
    return Asker(config.worker, config.algorithm, contexts, processing, stack.enter_context(RewardPool(reward)))


@contextlib.contextmanager
def engine(
    config: RunConfig, processing: Processing, actor: Path | None, most_visuals: tuple[int, int]
) -> Iterator[Generator]:
    """Yields a generator with the weights of a checkpoint's `actor` folder; without one, with the model's own."""
    adapter = None if actor is None else adapter_of(actor)
    with contextlib.ExitStack() as stack:
        of_run = settings_of_run(
            config.data, config.worker, num_devices=config.trainer.num_devices, most_visuals=most_visuals
        )
        settings = dataclasses.replace(
            of_run,
            model_path=of_run.model_path if actor is None or adapter is not None else _merged(actor, config, stack),
            lora_rank=0 if adapter is None else int(str(adapter.adapter_config["r"])),
            max_num_batched_tokens=max(config.worker.rollout.max_num_batched_tokens, of_run.max_model_len),
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
