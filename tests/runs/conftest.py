from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import actors
import pytest
from generator_cases import picture
from isolation import own_caches
from training_runs import REWARD_FUNCTIONS, BuildActor, FinishedRun, Prepare, Train, encoded, rows_of, run

from cepo.data.batch import ScoringRow
from cepo.models.processing import Processing


@pytest.fixture(autouse=True)
def _no_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here outlives a power cut, so that runs need not wait for it: about 30 times each."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="session", autouse=True)
def _no_trace_in_the_users_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Data files are converted, and their rows checked, once for each of their versions; those of tests end with the tests."""
    with own_caches(tmp_path_factory.mktemp("caches")):
        yield


@pytest.fixture(scope="session")
def problem_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight problems of the built-in toy task, each with one picture. Read only."""
    from cepo.microgeo.world import split_problems, write_problems

    train, _ = split_problems(0, 8, 1)
    file = tmp_path_factory.mktemp("problems") / "train.parquet"
    write_problems(file, train)
    return file


@pytest.fixture(scope="session")
def parity_reward() -> str:
    return f"{REWARD_FUNCTIONS}:parity"


@pytest.fixture(scope="session")
def tiny_run(tiny_model_folder: Path, problem_file: Path, parity_reward: str) -> list[str]:
    """4 prompts x 4 responses of at most 10 tokens and two optimizer steps per training step, in float32."""
    return [
        "config=configs/microgeo/base.yaml",
        f"data.train_files={problem_file}",
        "data.val_files=null",
        "data.max_response_length=10",
        "data.rollout_batch_size=4",
        f"worker.actor.model.model_path={tiny_model_folder}",
        "worker.actor.global_batch_size=2",
        "worker.actor.micro_batch_size_per_device_for_update=8",
        "worker.actor.micro_batch_size_per_device_for_experience=16",
        "worker.actor.optim.lr=1e-3",
        "worker.rollout.name=transformers",
        "worker.rollout.n=4",
        f"worker.reward.reward_function={parity_reward}",
        "trainer.val_before_train=false",
        "trainer.logger=[file]",
        "trainer.max_steps=2",
        "trainer.rollouts_to_log=4",
    ]


@pytest.fixture(scope="session")
def once(tiny_run: list[str], tmp_path_factory: pytest.TempPathFactory) -> Train:
    """The tiny run with overrides, trained once for all tests that read it: nothing in its folder may be changed."""
    return functools.cache(lambda *overrides: run(tiny_run, *overrides, folder=tmp_path_factory.mktemp("once")))


@pytest.fixture
def train(tiny_run: list[str], tmp_path: Path) -> Train:
    """Runs the tiny run with overrides, in the folder `name` of the test's own."""

    def train(*overrides: str, name: str = "run", prepare: Prepare | None = None) -> FinishedRun:
        return run(tiny_run, *overrides, folder=tmp_path / name, prepare=prepare)

    return train


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test refuses must be refused before a model is loaded."""

    def loaded(*_: object) -> None:
        raise AssertionError("a model was about to be loaded")

    monkeypatch.setattr("cepo.train.build_backend", loaded)


@pytest.fixture
def build_actor(tiny_model_folder: Path) -> BuildActor:
    """Makes an actor on the tiny checkpoint, or on that of `folder`."""
    return lambda *, folder=tiny_model_folder, **settings: actors.build_actor(folder, **settings)


@pytest.fixture
def rows(tiny_processing: Processing) -> list[ScoringRow]:
    """Two responses each behind no picture, one, and two of other sizes."""
    contexts = [
        encoded(tiny_processing, "What is 2 + 3?"),
        encoded(tiny_processing, "Find x of this figure, please.", picture(1)),
        encoded(tiny_processing, "Which is larger?", picture(2, (96, 64)), picture(3, (128, 96))),
    ]
    return rows_of(contexts, (9, 3, 17, 1, 6, 12))
