"""Every error class of the package is raised here, and its message names the key, the value and the remedy."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from config_arguments import load
from datasets import Dataset

import cepo
from cepo.config import check_config
from cepo.config.schema import DataConfig, TrainerConfig
from cepo.data.dataset import ProblemSet
from cepo.errors import (
    CepoError,
    CheckpointError,
    ConfigError,
    DataError,
    EngineError,
    ForeignFileError,
    RewardError,
    WorkerLostError,
)
from cepo.files.safe_files import read_text
from cepo.rewards.contract import (
    BatchContractError,
    ContractError,
    resolve_reward_path,
    validate_score,
    validate_scores,
)
from cepo.run_folder.layout import FILES_FILE, STATE_FILE
from cepo.run_folder.sinks.files import _writing
from cepo.sections.reader import SectionError, read_section
from cepo.trainer.checkpoints import CheckpointStore, written_files
from cepo.trainer.health import Health
from cepo.trainer.run_policy import RunFinishedError, RunPolicy

PACKAGE = Path(cepo.__file__).parent


def a_prompt_that_is_too_long(_: Path) -> None:
    config = DataConfig(train_files="rows.jsonl", filter_overlong_prompts=False)
    processing: Any = SimpleNamespace(template_ids=lambda *_, **__: range(999))
    ProblemSet(
        "rows.jsonl",
        config,
        processing,
        rows=Dataset.from_dict({"prompt": ["Find x."], "answer": ["7"]}),
    )


def a_link_out_of_the_folder(folder: Path) -> None:
    (folder / "config.yaml").symlink_to("/etc/hostname")
    read_text(folder / "config.yaml", within=folder)


def a_checkpoint_of_another_run(folder: Path) -> None:
    (folder / STATE_FILE).write_text(json.dumps({"format": 2, "adv_estimator": "grpo", "state": {}}))
    CheckpointStore(folder, keep=1, identity={"adv_estimator": "cepo"}).read(folder)


def updates_that_are_all_skipped(_: Path) -> None:
    health = Health(TrainerConfig(max_skipped_steps=2))
    for step in (1, 2):
        health.count_skipped(step, 1, 1)
    health.require_updates()


def records_without_room(folder: Path) -> None:
    with _writing(folder):
        raise OSError(28, "No space left on device")


def a_worker_that_has_died(folder: Path) -> None:
    from ray.exceptions import ActorDiedError

    from cepo.runtime.rank_process import RankLocation
    from cepo.runtime.ray_backend import Ranks

    ranks = object.__new__(Ranks)  # one dies in tests/runs/test_ray.py
    ranks.locations = [RankLocation("10.0.0.5", 4711, 0, True)]
    ranks._logs = [folder / "rank_0.log"]
    ranks._logs[0].write_text("CUDA error: out of memory\n")
    raise ranks._lost(0, "the call `update`", ActorDiedError())


def a_run_whose_steps_are_all_done(folder: Path) -> None:
    (folder / STATE_FILE).write_text(json.dumps({"format": 2, "state": {"step": 3}, "val_reward_score": 0.5}))
    (folder / FILES_FILE).write_text(json.dumps(written_files(folder)))
    policy = RunPolicy(TrainerConfig(load_checkpoint_path=str(folder)), identity={})
    policy.choose_start(data="", total_steps=3, kl_coefficient=0.0)


CASES: dict[type[CepoError], tuple[Callable[[Path], object], list[str]]] = {
    CepoError: (records_without_room, ["the run's records", "No space left on device", "Free disk space"]),
    ConfigError: (
        lambda _: check_config(load("data.rollout_batch_size=4", "worker.actor.global_batch_size=3")),
        ["worker.actor.global_batch_size", "=3", "Set global_batch_size to a divisor of 4: 1, 2, 4"],
    ),
    SectionError: (
        lambda _: read_section(DataConfig, {"train_files": "rows.jsonl", "seed": -1}, path="data"),
        ["data.seed", "got -1", "must be at least 0"],
    ),
    DataError: (
        a_prompt_that_is_too_long,
        ["data.max_prompt_length is 512", "999 tokens", "data.filter_overlong_prompts=true leaves such rows out"],
    ),
    ForeignFileError: (a_link_out_of_the_folder, ["config.yaml", "lies outside of", "copy the file there"]),
    RewardError: (
        lambda _: resolve_reward_path("nowhere.py:score"),
        ["reward function", "'nowhere.py:score'", "Give path/to/file.py:function"],
    ),
    ContractError: (
        lambda _: validate_score({"overall": float("nan")}, sample=3, source="rewards.py:score"),
        ["sample 3 'overall'", "nan", "Return a number from -1e+18 to 1e+18"],
    ),
    BatchContractError: (
        lambda _: validate_scores([{"overall": 1.0}], 2, source="rewards.py:score"),
        ["rewards.py:score", "1 scores for 2 samples", "Return one per sample"],
    ),
    CheckpointError: (
        a_checkpoint_of_another_run,
        [
            "adv_estimator=grpo",
            "this run has cepo",
            "set it to grpo to continue from there. trainer.find_last_checkpoint",
        ],
    ),
    RunFinishedError: (a_run_whose_steps_are_all_done, ["trainer.max_steps", "all 3 steps", "to add steps"]),
    EngineError: (
        updates_that_are_all_skipped,
        ["trainer.max_skipped_steps=2", "the last 2 steps", "continue from one with a lower worker.actor.optim.lr"],
    ),
    WorkerLostError: (
        a_worker_that_has_died,
        [
            "rank 0 (machine 10.0.0.5, process 4711) died during the call `update`",
            "rank_0.log",
            "CUDA error: out of memory",
        ],
    ),
}
"""Error class -> what raises it, and the key, the value and the remedy in its message."""


def classes_in_the_code() -> set[type[BaseException]]:
    """Every class of the package that derives, directly or not, from an exception."""
    error_classes: set[type[BaseException]] = set()
    for file in sorted(PACKAGE.rglob("*.py")):
        if re.search(r"^class \w+\(.*(Error|Exception|Interrupt)\b", file.read_text("utf-8"), re.MULTILINE):
            module = importlib.import_module(".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts))
            defined_classes = [
                value
                for value in vars(module).values()
                if isinstance(value, type) and value.__module__ == module.__name__
            ]
            error_classes |= {value for value in defined_classes if issubclass(value, BaseException)}
    return error_classes


def test_every_error_class_of_the_code_has_a_case() -> None:
    assert classes_in_the_code() == set(CASES)


@pytest.mark.parametrize("error", CASES, ids=lambda error: error.__name__)
def test_each_error_names_key_value_and_remedy(error: type[CepoError], tmp_path: Path) -> None:
    provoke, parts = CASES[error]
    with pytest.raises(error) as caught:
        provoke(tmp_path)
    assert type(caught.value) is error
    assert [part for part in parts if part not in str(caught.value)] == [], caught.value
