"""The real-model example: its problems, its reward, and a step of its configuration with the toy model."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from case_files import cases
from json_files import read_lines

from cepo.config import check_config, load_config
from cepo.microgeo.world import ASSETS
from cepo.train import train

EXAMPLE = Path(__file__).parents[2] / "examples" / "real_model"
PROBLEMS = runpy.run_path(str(EXAMPLE / "problems.py"))
REWARD = runpy.run_path(str(EXAMPLE / "reward.py"))


def test_the_generator_writes_the_problems_that_are_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["problems.py", "--folder", str(tmp_path)])
    PROBLEMS["main"]()
    for name in ("train.jsonl", "held_out.jsonl"):
        assert (tmp_path / name).read_bytes() == (EXAMPLE / name).read_bytes()


def test_no_held_out_problem_is_trained_on() -> None:
    training = {row["question"] for row in read_lines(EXAMPLE / "train.jsonl")}
    held_out = {row["question"] for row in read_lines(EXAMPLE / "held_out.jsonl")}
    assert len(training) == 800
    assert len(held_out) == 256
    assert not training & held_out


def test_every_worked_solution_earns_the_reward() -> None:
    training_rows = read_lines(EXAMPLE / "train.jsonl")
    held_out_rows = read_lines(EXAMPLE / "held_out.jsonl")
    assert training_rows
    assert held_out_rows
    for row in training_rows + held_out_rows:
        score = REWARD["compute_score"]({"response": row["solution"], "ground_truth": row["answer"]})
        assert score == {"overall": 1.0, "accuracy": 1.0}, row


@pytest.mark.parametrize(
    ("response", "answer"),
    cases(__file__, "last_numbers.yaml"),
)
def test_the_answer_is_the_last_number_if_it_is_whole(response: str, answer: str | None) -> None:
    assert REWARD["last_number"](response) == answer


def test_without_a_hub_the_weights_come_from_elsewhere(tmp_path: Path) -> None:
    """Whichever HTTP client the installed hub library has: some versions have httpx, and some do not."""
    program = (
        "import runpy, sys; sys.modules['httpx'] = None; "
        f"print(runpy.run_path({str(EXAMPLE / 'weights.py')!r})['download_from_hub']({str(tmp_path)!r}))"
    )
    without_hub = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", program], env=without_hub, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    message, is_downloaded = done.stdout.splitlines()
    assert "taking the package" in message
    assert is_downloaded == "False"


@pytest.mark.heavy
def test_the_configuration_trains_a_step_with_the_toy_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a folder that is not the repository's; 2 problems x 4 responses, and a validation of all held-out ones."""
    monkeypatch.chdir(tmp_path)
    config = load_config(
        [
            "config=real_model/cepo",
            f"worker.actor.model.model_path={ASSETS}",
            "worker.actor.global_batch_size=2",
            "worker.rollout.n=4",
            "data.rollout_batch_size=2",
            "data.max_response_length=8",
            "trainer.max_steps=1",
            "trainer.val_before_train=false",
            "trainer.logger=[file]",
        ]
    )
    check_config(config)
    train(config)
    run_folder = tmp_path / "checkpoints" / "cepo" / "real_model-cepo"
    [metrics] = read_lines(run_folder / "metrics.jsonl")
    assert 0 <= metrics["val/accuracy"] <= 1
    assert 0 <= metrics["reward/accuracy"] <= 1
    assert (run_folder / "global_step_1").is_dir()
