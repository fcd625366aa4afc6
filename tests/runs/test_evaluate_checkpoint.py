"""A checkpoint is evaluated with the weights that were trained, be they an adapter or the whole model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training_runs import json_lines, run

from cepo.cli import main

pytestmark = pytest.mark.heavy


def test_a_checkpoint_answers_as_its_merged_folder_does(
    tiny_run: list[str], problem_file: Path, tiny_model_folder: Path, parity_reward: str, tmp_path: Path
) -> None:
    settings = ("worker.actor.model.lora.rank=4", "worker.actor.optim.lr=1e-2", "trainer.max_steps=1")
    run(tiny_run, *settings, folder=tmp_path / "run")
    checkpoint = tmp_path / "run" / "global_step_1"
    assert main(["merge", "--checkpoint", str(checkpoint), "--out", str(tmp_path / "merged")]) == 0
    config = f"config={tmp_path / 'run' / 'config.yaml'}"
    responses = {}
    # Without config= the run's own is taken, but for the reward file, which would run.
    for name, given in (
        ("checkpoint", [f"checkpoint={checkpoint}", f"worker.reward.reward_function={parity_reward}"]),
        ("merged", [config, f"checkpoint={tmp_path / 'merged'}"]),
        ("base", [config, f"checkpoint={tiny_model_folder}"]),
    ):
        out = tmp_path / f"of-{name}"
        assert main(["evaluate", *given, f"data={problem_file}", "n=2", f"out={out}"]) == 0
        responses[name] = [row["response"] for row in json_lines(out / "generations.jsonl")]
        results = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))
        assert results["sampling"] == {
            "num_samples": 2, "max_response_length": 10, "temperature": 1.0, "top_p": 1.0, "top_k": -1,
            "presence_penalty": 0.0, "ignore_eos": False,
        }  # fmt: skip
        assert results["benchmarks"]["train"]["num_problems"] == 8
        assert "parity.py" in results["benchmarks"]["train"]["reward_function"]
    assert len(responses["checkpoint"]) == 16
    assert responses["checkpoint"] == responses["merged"]
    assert responses["checkpoint"] != responses["base"]
