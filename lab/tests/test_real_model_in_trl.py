"""The real-model example in TRL, with a tiny text model: cepo's advantages there, and what its record has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints.smollm import write_smollm_like

pytest.importorskip("trl", reason="the extra `trl` is not installed")
pytestmark = pytest.mark.heavy


def compute_score(reward_input: Mapping[str, Any]) -> dict[str, float]:
    """Accepts every response with an even number of characters, because a model with random weights solves nothing."""
    return {"overall": 1.0 - len(reward_input["response"]) % 2, "accuracy": 1.0 - len(reward_input["response"]) % 2}


REWARD_TYPE = "sequential"


def number_of_characters(response: str) -> str:
    return str(len(response))


def test_advantages_in_trl_are_cepos_own_at_each_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps of 2 problems x 4 responses with each method; a second call trains nothing and writes the same record."""
    from lab.real_model_in_trl import main

    model = write_smollm_like(tmp_path / "model")
    arguments = [
        f"--model={model}", "--steps=2", "--compared-steps=2", "--validate-every=1", "--micro-batch=4",
        f"--runs={tmp_path / 'runs'}", f"--out={tmp_path / 'record.json'}",
        "data.rollout_batch_size=2", "worker.actor.global_batch_size=2", "worker.rollout.n=4",
        "data.max_response_length=8", "data.max_prompt_length=512", "worker.actor.optim.lr=1e-2",
        "trainer.val_max_samples=4",
        f"worker.reward.reward_function={__file__}:compute_score",
        f"worker.reward.answer_function={__file__}:number_of_characters",
    ]  # fmt: skip
    assert main(arguments) == 0
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    in_cepo, in_trl = record["runs"]
    assert [comparison["step"] for comparison in in_cepo["comparisons"]] == [1, 2]
    for comparison in in_cepo["comparisons"]:
        assert comparison["largest_advantage"] > 0.5
        assert comparison["largest_difference"] < 1e-4
    for run in (in_cepo, in_trl):
        assert len(run["trained"]) == len(run["step_seconds"]) == 2
        assert list(run["held_out"]) == ["0", "1", "2"]
        assert run["num_held_out"] == 4
    assert in_cepo["held_out"]["0"] == in_trl["held_out"]["0"]
    capsys.readouterr()
    assert main(arguments) == 0
    assert "step" not in capsys.readouterr().out.partition("|")[0]
