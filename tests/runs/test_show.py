"""`cepo show`: the credit of a model's tokens without training, and of a given text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training_runs import EVERY_WRONG_ROLLOUT_TEACHES, REPOSITORY, recorded_groups

from cepo.cli import main

pytestmark = pytest.mark.heavy


def test_a_given_text_is_scored_beside_sampled_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two problems the first gets it as its first response; its answer is right, and every response is scored."""
    problems = [{"problem": f"{k} + 1?", "answer": str(k + 1)} for k in range(3)]
    data, response, out = tmp_path / "data.jsonl", tmp_path / "response.txt", tmp_path / "out"
    data.write_text("".join(json.dumps(row) + "\n" for row in problems), encoding="utf-8")
    response.write_text("It is \\boxed{1}\n", encoding="utf-8")
    arguments = ["microgeo:model", str(data), f"config={REPOSITORY / 'configs' / 'microgeo' / 'base.yaml'}"]
    settings = ["algorithm.adv_estimator=cepo", EVERY_WRONG_ROLLOUT_TEACHES, "worker.rollout.name=transformers"]
    settings += ["worker.rollout.n=4", "data.max_response_length=16"]
    options = ["--response", str(response), "--problems", "2", "--out", str(out)]
    assert main(["show", *arguments, *settings, *options]) == 0
    assert capsys.readouterr().out.endswith(f"page: {out / 'report.html'}\n")
    first, second = recorded_groups(out)
    assert [len(first["rollouts"]), len(second["rollouts"])] == [4, 4]
    given = first["rollouts"][0]
    assert given["response"].startswith("It is \\boxed{1}")
    assert given["accuracy"] == 1
    assert all(rollout["is_scored"] for group in (first, second) for rollout in group["rollouts"])
    assert all(value < 0 for value in given["log_probs"]["student"])
    assert len(given["log_probs"]["correct"]) == len(given["tokens"])
    assert given["references"]["correct"] == "1"
    assert not list(out.glob("global_step_*"))


def test_show_without_a_config_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "microgeo:model", "microgeo:validation"]) == 2
    assert "give config=FILE" in capsys.readouterr().err
