"""Rewards of finished groups while others are still generated: the same run, earlier."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training_runs import differing, run

from cepo.rollout.generator import Generation
from cepo.trainer.loop import Trainer

pytestmark = pytest.mark.heavy

MARKING_REWARD = """
from pathlib import Path

def parity(samples):
    Path(__file__).with_name("a_reward_began").touch()
    verdicts = [float(sum(map(ord, sample["response"])) % 2 == 0) for sample in samples]
    return [{"overall": verdict, "accuracy": verdict} for verdict in verdicts]
"""
ONE_STEP = ["algorithm.adv_estimator=grpo", "trainer.max_steps=1"]


def wait_until_there(file: Path) -> None:
    start = time.monotonic()
    while not file.exists():
        assert time.monotonic() - start < 300, f"{file.name} was not made while generation waited for it"
        time.sleep(0.01)


def test_the_first_reward_begins_before_generation_ends(tiny_run: list[str], tmp_path: Path) -> None:
    engine = "vllm" if importlib.util.find_spec("vllm") else "transformers"
    (tmp_path / "marking.py").write_text(MARKING_REWARD, encoding="utf-8")
    announced: list[int] = []

    def prepare(trainer: Trainer) -> None:
        generate = trainer.backend.generate

        def generate_and_watch(
            requests: Any, settings: Any, on_finished: Callable[[int, list[Generation]], None]
        ) -> Any:
            def watch(index: int, group: list[Generation]) -> None:
                announced.append(index)
                if len(announced) == len(requests):
                    wait_until_there(tmp_path / "a_reward_began")
                on_finished(index, group)

            return generate(requests, settings, watch)

        trainer.backend.generate = generate_and_watch  # type: ignore[method-assign]

    reward = [f"worker.reward.reward_function={tmp_path / 'marking.py'}:parity", f"worker.rollout.name={engine}"]
    finished = run(tiny_run, *ONE_STEP, *reward, folder=tmp_path / "run", prepare=prepare)
    assert sorted(announced) == [0, 1, 2, 3]
    assert 0 < finished.metrics[0]["work/rollout_prefix_hits"] <= 3 / 4


def test_a_backend_without_announcements_ends_alike(tiny_run: list[str], tmp_path: Path) -> None:

    def silent(trainer: Trainer) -> None:
        generate = trainer.backend.generate
        trainer.backend.generate = lambda requests, settings, _=None: generate(requests, settings)  # type: ignore[method-assign]

    options = ["algorithm.adv_estimator=cepo", "trainer.max_steps=1"]
    early = run(tiny_run, *options, folder=tmp_path / "early")
    late = run(tiny_run, *options, folder=tmp_path / "late", prepare=silent)
    assert len(early.rollouts) == 4
    assert early.rollouts == late.rollouts
    assert [row["reward/mean"] for row in early.metrics] == [row["reward/mean"] for row in late.metrics]
    assert not differing(early.parameters, late.parameters)


def test_a_capped_validation_asks_the_same_problems_each_time(
    tiny_run: list[str], problem_file: Path, tmp_path: Path
) -> None:
    asked: list[tuple[int, ...]] = []

    def listen(trainer: Trainer) -> None:
        assert trainer.validator is not None
        generate = trainer.backend.generate

        def note(requests: Any, settings: Any, on_finished: Any) -> Any:
            if settings.max_response_length == 10 and len(requests) != 4:
                asked.append(tuple(request.seed for request in requests))
            return generate(requests, settings, on_finished)

        trainer.backend.generate = note  # type: ignore[method-assign]

    validation = [
        f"data.val_files={problem_file}",
        "trainer.val_before_train=true",
        "trainer.val_freq=1",
        "trainer.val_max_samples=3",
    ]
    finished = run(tiny_run, "algorithm.adv_estimator=grpo", *validation, folder=tmp_path, prepare=listen)
    validated = [row for row in finished.metrics if "val/num_samples" in row]
    assert [row["step"] for row in validated] == [0, 1, 2]
    assert len(set(asked)) == 1
    assert [len(seeds) for seeds in asked] == [3, 3, 3]
    assert len({row["val/num_samples"] for row in validated}) == 1
