"""Provides the commands `config`, `evaluate` and `merge` as functions that return values."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cepo.config import RunConfig, check_config
from cepo.config import load_config as _load_config
from cepo.errors import ConfigError
from cepo.files.safe_files import read_objects
from cepo.files.trees import Fields
from cepo.sections.call_types import checks_types

if TYPE_CHECKING:
    import pandas


@checks_types
def load_config(file: Path | str | None = None, settings: dict[str, Any] | None = None) -> RunConfig:
    """Returns a checked configuration: a YAML file, overridden by settings.

    Args:
        file: as after `config=` on a command line, such as `microgeo/quickstart`; None for the defaults.
        settings: values by dotted name. A text is read as on a command line, so that "1e-3" is a number.

    Raises:
        ConfigError: the file does not exist, or a setting is unknown, has the wrong type or contradicts another.
    """
    config = _load_config(_arguments(file, settings))
    check_config(config)
    return config


@checks_types
def evaluate(
    checkpoint: Path | str | None = None,
    data: str | None = None,
    *,
    config: Path | str | None = None,
    settings: dict[str, Any] | None = None,
    out: Path | str | None = None,
    n: int | None = None,
    temperature: float | None = None,
    protocol: Literal["paper", "lmms"] | None = None,
    judge: str | None = None,
    judge_model: str | None = None,
) -> Evaluation:
    """Measures the accuracy of a checkpoint or a model on data and benchmarks, as `cepo evaluate` does.

    Args:
        checkpoint: `global_step_<N>` of a run, a model folder or a hub name; None for the configuration's model.
        data: sources, separated by commas, each optionally after the name of a benchmark, as in `mathvista:FILE`; None for
            `data.val_files`.
        config: as in `load_config`; None for the settings of the checkpoint's run.
        settings: as in `load_config`.
        out: a new folder for the results; None for one below `evaluations`.
        n: responses per problem.
        temperature: sampling temperature; 0 is greedy and needs n = 1.
        protocol: the paper's sampling, or lmms-eval's prompts and sampling.
        judge: address of an OpenAI-compatible server, up to `/v1`, that judges free-form answers; None leaves them out.
        judge_model: its model.

    Raises:
        ConfigError, CheckpointError, DataError, EngineError, RewardError: as `cepo evaluate` reports them.
    """
    from cepo.commands.evaluate import planned
    from cepo.evaluation.evaluate import evaluate as evaluated

    arguments = {
        "checkpoint": checkpoint,
        "data": data,
        "out": out,
        "n": n,
        "temperature": temperature,
        "protocol": protocol,
        "judge": judge,
        "judge_model": judge_model,
    }
    options = {name: str(value) for name, value in arguments.items() if value is not None}
    plan = planned(options, _arguments(config, settings))
    return Evaluation(folder=plan.out, results=evaluated(plan))


@checks_types
def merge(
    checkpoint: Path | str,
    out: Path | str,
    *,
    base: str | None = None,
    chat_template: Path | str | None = None,
    config: Path | str | None = None,
    dtype: Literal["bf16", "fp16", "fp32"] | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Exports a checkpoint as a Hugging Face folder, as `cepo merge` does, and returns the folder.

    Args:
        checkpoint: `global_step_<N>` of a run, or its subfolder `actor`.
        out: a folder that does not exist or is empty.
        base: the model that training started from; None for the one that the run names.
        chat_template: file of the template that the run was trained with; None for the run's.
        config: the run's configuration, if you trust it; None for the run's config.yaml, which of a stranger's run decides
            no model and no file outside the run.
        dtype: type of the written weights; None for the base's.
        trust_remote_code: whether Python code that comes with the base may run.

    Raises:
        CheckpointError: the checkpoint or its base cannot be read, or `out` cannot be written.
        ConfigError: the run's config.yaml names a model of a stranger or a file outside the run, or refers to another
            setting.
    """
    from cepo.commands.merge import merge_into
    from cepo.workers.merged_model import actor_folder
    from cepo.workers.named_checkpoint import find_base

    actor = actor_folder(Path(checkpoint))
    template = None if chat_template is None else Path(chat_template)
    trusted = None if config is None else Path(config)
    model = find_base(actor, path=base, chat_template=template, trust_remote_code=trust_remote_code, config=trusted)
    merge_into(model, actor, Path(out), dtype=dtype)
    return Path(out)


@checks_types
def push(checkpoint: Path | str, name: str, *, private: bool = True) -> str:
    """Publishes a checkpoint on the Hugging Face hub and returns the address of the commit.

    The repository has the adapter at its root, in PEFT's format, the checkpoint `global_step_<N>`, the run's `config.yaml`,
    and a card with data, method, settings, curve, accuracy and versions. After `hf download NAME --local-dir FOLDER`,
    training resumes with `trainer.load_checkpoint_path=FOLDER/global_step_<N>`. `cepo merge --upload` publishes merged weights.

    Args:
        checkpoint: `global_step_<N>` of a run.
        name: `org/name`.
        private: whether a new repository is private; an existing one remains as it is.

    Raises:
        ConfigError: `name` is not a repository's, or no token is set.
        CheckpointError: the checkpoint cannot be read, or the hub cannot be reached or rejects the upload.
    """
    from cepo.report.publishing import publish_checkpoint

    return publish_checkpoint(Path(checkpoint), name, private=private)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The results of an evaluation: the `folder` they were written to, and the content of `evaluation.json`."""

    folder: Path
    results: Fields

    @cached_property
    def accuracy(self) -> pandas.DataFrame:
        """Accuracy in [0, 1] by benchmark, with its standard error over problems and the numbers of problems and responses."""
        import pandas

        rows: dict[str, Fields] = {}
        for name, figures in self.results["benchmarks"].items():
            rows[name] = {
                "accuracy": figures["accuracy"]["mean"],
                "error": figures["accuracy"]["error"],
                "num_problems": figures["num_problems"],
                "num_responses": figures["num_responses"],
            }
        return pandas.DataFrame.from_dict(rows, orient="index")

    @cached_property
    def responses(self) -> pandas.DataFrame:
        """The graded responses, one row each: benchmark, problem_id, response, answer, correct, length, ..."""
        import pandas

        from cepo.evaluation.results import GENERATIONS_FILE

        return pandas.DataFrame(list(read_objects(self.folder / GENERATIONS_FILE, within=self.folder)))


def _arguments(file: Path | str | None, settings: dict[str, Any] | None) -> list[str]:
    """Returns a command line. JSON is YAML, so other values than texts keep their type."""
    words: list[str] = []
    if file is not None:
        words.append(f"config={str(file).removeprefix('config=')}")
    for key, value in (settings or {}).items():
        words.append(f"{key}={_written(key, value)}")
    return words


def _written(key: str, value: object) -> str:
    """Returns a setting's value as it is written on a command line; raises `ConfigError` for one that cannot be."""
    if isinstance(value, str | Path):
        return str(value)
    try:
        return json.dumps(value)
    except TypeError:
        raise ConfigError(
            f"{key} has a {type(value).__name__}; accepted: texts, numbers, lists and dicts of them, and None. A function is "
            "named as 'FILE.py:FUNCTION', and data by a file, a folder or a hub name"
        ) from None
