"""The package as a library: what `import cepo` costs and offers, a run as values, callbacks, evaluation and merge."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest

import cepo
from cepo.trainer.asking import Rollouts
from cepo.trainer.planning import ScoredBatch, ScoringPlan
from cepo.types import TokenSignal

NAMES = ("Callback", "Evaluation", "Run", "RunConfig", "evaluate", "load_config", "merge", "open_run", "push", "train")


class Witness(cepo.Callback):
    """Notes the order of the calls, and checks that each comes with the values of its stage."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.recorded: dict[int, Mapping[str, float]] = {}

    def after_ask(self, rollouts: Rollouts) -> None:
        assert len(rollouts.responses) == 16
        self.calls.append(f"ask {rollouts.step}")

    def after_plan(self, plan: ScoringPlan) -> None:
        self.calls.append("plan")

    def after_score(self, batch: ScoredBatch) -> None:
        assert batch.old_log_probs.shape == batch.rollouts.response_mask.shape
        self.calls.append("score")

    def after_estimate(self, batch: ScoredBatch, signal: TokenSignal) -> None:
        assert signal.advantages.shape == batch.old_log_probs.shape
        self.calls.append("estimate")

    def after_update(self, batch: ScoredBatch, signal: TokenSignal) -> None:
        self.calls.append("update")

    def after_record(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append("record")
        self.recorded[step] = metrics

    def after_validate(self, step: int, metrics: Mapping[str, float]) -> None:
        assert 0 <= metrics["val/accuracy"] <= 1
        self.calls.append(f"validate {step}")


@pytest.fixture(scope="module")
def trained(
    tiny_run: list[str], problem_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[cepo.Run, list[Witness]]:
    """Two steps, validated before and after, with two callbacks."""
    folder = tmp_path_factory.mktemp("library") / "run"
    settings: dict[str, object] = dict(argument.split("=", 1) for argument in tiny_run)
    file = str(settings.pop("config"))
    settings |= {"trainer.save_checkpoint_path": folder, "data.val_files": str(problem_file)}
    settings |= {"trainer.val_before_train": True, "trainer.val_generations_to_log": 2}
    settings |= {"worker.actor.model.lora.rank": 4, "worker.actor.optim.lr": 1e-2}
    witnesses = [Witness(), Witness()]
    return cepo.train(cepo.load_config(file, settings), callbacks=witnesses), witnesses


def test_import_cepo_imports_one_module_of_its_own() -> None:
    """Its time is that of one small file: nothing else is loaded, not even from the standard library."""
    code = "import sys; before = set(sys.modules); import cepo; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["cepo"]


def test_all_names_are_there_and_others_are_an_error() -> None:
    assert set(NAMES) <= set(dir(cepo))
    for name in NAMES:
        assert callable(getattr(cepo, name)), name
    with pytest.raises(AttributeError, match="module 'cepo' has no attribute 'trian'"):
        _ = cepo.trian  # pyright: ignore[reportAttributeAccessIssue]


def test_the_stub_names_what_the_package_offers() -> None:
    """Type checkers read `cepo/__init__.pyi`, which repeats the names of `cepo/__init__.py`."""
    stub = Path(cepo.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    assert {line.split(" as ")[-1] for line in stub.splitlines() if " as " in line} == set(NAMES)


def test_train_is_callable_whoever_imported_the_module_first() -> None:
    from cepo.train import train

    assert type(sys.modules["cepo.train"]).__call__ is train
    assert callable(cepo.train)


@pytest.mark.heavy
def test_callbacks_are_called_at_the_verbs_of_the_loop(trained: tuple[cepo.Run, list[Witness]]) -> None:
    _, (first, second) = trained
    step = ["plan", "score", "estimate", "update", "record"]
    assert first.calls == ["validate 0", "ask 0", *step, "ask 1", *step, "validate 2"]
    assert second.calls == first.calls


@pytest.mark.heavy
def test_metrics_are_a_data_frame_of_what_was_recorded(trained: tuple[cepo.Run, list[Witness]]) -> None:
    run, (witness, _) = trained
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert list(run.metrics.index) == [0, 1, 2]
    assert run.metrics.loc[2, "reward/mean"] == witness.recorded[2]["reward/mean"] == lines[2]["reward/mean"]
    assert numpy.isnan(run.metrics.loc[0, "reward/mean"])
    assert run.config["trainer"]["max_steps"] == 2
    assert run.estimator == "grpo"


@pytest.mark.heavy
def test_rollouts_are_a_data_frame_with_a_row_each(trained: tuple[cepo.Run, list[Witness]]) -> None:
    """Two steps of 4 groups of 4; the advantages have one entry per token."""
    run, _ = trained
    rollouts = cepo.open_run(run.folder).rollouts
    assert len(rollouts) == 32
    assert sorted(rollouts["step"].unique()) == [1, 2]
    assert list(map(len, rollouts["tokens"])) == list(map(len, rollouts["token_advantages"]))
    assert set(run.validation_samples["step"]) == {0, 2}


@pytest.mark.heavy
def test_a_run_names_its_checkpoints_and_writes_its_page(
    trained: tuple[cepo.Run, list[Witness]], tmp_path: Path
) -> None:
    run, _ = trained
    assert run.checkpoints == {2: run.folder / "global_step_2"}
    page = run.page(tmp_path / "page.html")
    assert run.name in page.read_text(encoding="utf-8")


@pytest.mark.heavy
def test_evaluation_and_merge_return_values(
    trained: tuple[cepo.Run, list[Witness]],
    tiny_model_folder: Path,
    problem_file: Path,
    parity_reward: str,
    tmp_path: Path,
) -> None:
    """Eight problems with two responses each; a checkpoint answers as its merged folder does, and not as its base."""
    run, _ = trained
    # Without a configuration the run's own is taken, but for the reward file, which would run.
    settings: dict[str, Any] = {"worker.reward.reward_function": parity_reward}
    found = cepo.evaluate(run.checkpoints[2], str(problem_file), n=2, settings=settings, out=tmp_path / "one")
    assert len(found.responses) == 16
    assert found.accuracy.loc["train", "num_problems"] == 8
    assert found.accuracy.loc["train", "accuracy"] == found.responses["correct"].mean()
    results = json.loads((tmp_path / "one" / "evaluation.json").read_text(encoding="utf-8"))
    assert results["sampling"] == {
        "num_samples": 2, "max_response_length": 10, "temperature": 1.0, "top_p": 1.0, "top_k": -1,
        "presence_penalty": 0.0, "ignore_eos": False,
    }  # fmt: skip
    assert "parity.py" in results["benchmarks"]["train"]["reward_function"]
    merged, config = cepo.merge(run.checkpoints[2], tmp_path / "merged"), run.folder / "config.yaml"
    again, base = (
        cepo.evaluate(folder, str(problem_file), n=2, config=config, out=tmp_path / name)
        for name, folder in (("two", merged), ("base", tiny_model_folder))
    )
    assert list(again.responses["response"]) == list(found.responses["response"]) != list(base.responses["response"])


def test_open_run_refuses_a_folder_without_records(tmp_path: Path) -> None:
    from cepo.errors import DataError

    with pytest.raises(DataError, match=r"metrics\.jsonl does not exist"):
        cepo.open_run(tmp_path)
