from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
from json_files import read_lines

import cepo
from cepo.errors import DataError
from cepo.run_folder.layout import STAGES

NAMES = ("Callback", "Evaluation", "Run", "RunConfig", "evaluate", "load_config", "merge", "open_run", "push", "train")


class Witness(cepo.Callback):
    """Notes the name and the values of every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        for name in vars(cepo.Callback):
            if name.startswith("after_"):
                setattr(self, name, partial(self.note, name.removeprefix("after_")))

    def note(self, *call: Any) -> None:
        self.calls.append(call)


Trained = tuple[cepo.Run, list[Witness]]


@pytest.fixture(scope="module")
def trained(tiny_run: list[str], problem_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
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
    """Type checkers read `cepo/__init__.pyi`, which repeats the names of `cepo/__init__.py`."""
    assert set(NAMES) <= set(dir(cepo))
    assert all(callable(getattr(cepo, name)) for name in NAMES)
    with pytest.raises(AttributeError, match="module 'cepo' has no attribute 'trian'"):
        _ = cepo.trian  # pyright: ignore[reportAttributeAccessIssue]
    stub = Path(cepo.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    assert {line.split(" as ")[-1] for line in stub.splitlines() if " as " in line} == set(NAMES)


def test_train_is_callable_whoever_imported_the_module_first() -> None:
    from cepo.train import train

    assert type(sys.modules["cepo.train"]).__call__ is train
    assert callable(cepo.train)


@pytest.mark.heavy
def test_callbacks_get_the_values_of_each_verb_of_the_loop(trained: Trained) -> None:
    _, witnesses = trained
    step = ["sample", "plan", "score", "estimate", "update", "record"]
    for witness in witnesses:
        assert [name for name, *_ in witness.calls] == ["validate", *step, *step, "validate"]
        (_, start, metrics), (_, sampled), (_, plan), (_, batch), (_, _, signal), *_ = witness.calls
        assert start == 0
        assert witness.calls[-1][1] == 2
        assert 0 <= metrics["val/accuracy"] <= 1
        assert [call[1].step for call in witness.calls if call[0] == "sample"] == [0, 1]
        assert len(sampled.responses) == len(plan.live) == 16
        assert signal.advantages.shape == batch.old_log_probs.shape == batch.rollouts.response_mask.shape


@pytest.mark.heavy
def test_a_runs_records_are_data_frames_beside_its_page(trained: Trained, tmp_path: Path) -> None:
    """Two steps of 4 groups of 4; the advantages have one entry per token."""
    run, (witness, _) = trained
    lines = read_lines(run.folder / "metrics.jsonl")
    calls_of_record = [call for call in witness.calls if call[0] == "record"]
    recorded = {step: metrics for _, step, metrics in calls_of_record}
    assert list(run.metrics.index) == [0, 1, 2]
    assert run.metrics.loc[2, "reward/mean"] == recorded[2]["reward/mean"] == lines[2]["reward/mean"]
    assert numpy.isnan(run.metrics.loc[0, "reward/mean"])
    assert run.config["trainer"]["max_steps"] == 2
    assert run.estimator == "grpo"
    rollouts = cepo.open_run(run.folder).rollouts
    assert len(rollouts) == 32
    assert sorted(rollouts["step"].unique()) == [1, 2]
    assert list(map(len, rollouts["tokens"])) == list(map(len, rollouts["token_advantages"]))
    assert set(run.validation_samples["step"]) == {0, 2}
    assert run.checkpoints == {2: run.folder / "global_step_2"}
    assert run.name in run.page(tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.heavy
def test_each_stage_of_a_step_has_its_seconds(trained: Trained) -> None:
    """So the costs of sampling, scoring and updates can be compared; what was sampled is counted in tokens."""
    step = trained[0].metrics.loc[1]
    assert all(step[f"timing_s/{stage}"] > 0 for stage in STAGES if stage not in ("teachers", "validate", "save"))
    assert step["tokens/generate"] > 0


@pytest.mark.heavy
def test_evaluation_and_merge_return_values(
    trained: Trained, tiny_model_folder: Path, problem_file: Path, parity_reward: str, tmp_path: Path
) -> None:
    """Eight problems with two responses each; a checkpoint answers as its merged folder does, and not as its base."""
    run, _ = trained
    # Without a configuration the run's own is taken, but for the reward file, which would run.
    settings: dict[str, Any] = {"worker.reward.reward_function": parity_reward}
    evaluation = cepo.evaluate(run.checkpoints[2], str(problem_file), n=2, settings=settings, out=tmp_path / "one")
    assert len(evaluation.responses) == 16
    assert evaluation.accuracy.loc["train", "num_problems"] == 8
    assert evaluation.accuracy.loc["train", "accuracy"] == evaluation.responses["correct"].mean()
    results = json.loads((tmp_path / "one" / "evaluation.json").read_text(encoding="utf-8"))
    assert results["sampling"] == {
        "num_samples": 2, "max_response_length": 10, "temperature": 1.0, "top_p": 1.0, "top_k": -1,
        "presence_penalty": 0.0, "ignore_eos": False,
    }  # fmt: skip
    assert "reward_functions.py:parity" in results["benchmarks"]["train"]["reward_function"]
    merged = cepo.merge(run.checkpoints[2], tmp_path / "merged")
    config = run.folder / "config.yaml"
    of_merged = cepo.evaluate(merged, str(problem_file), n=2, config=config, out=tmp_path / "two")
    of_base = cepo.evaluate(tiny_model_folder, str(problem_file), n=2, config=config, out=tmp_path / "base")
    responses = list(evaluation.responses["response"])
    assert list(of_merged.responses["response"]) == responses
    assert list(of_base.responses["response"]) != responses


def test_open_run_refuses_a_folder_without_records(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl does not exist"):
        cepo.open_run(tmp_path)
