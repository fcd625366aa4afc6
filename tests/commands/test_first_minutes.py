"""Mistakes of the first minutes, and commands as people try them: each ends in one message, or does what was meant."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from config_arguments import REQUIRED, load, message_of, write
from isolation import restored_process

import cepo
from cepo.algorithms import Estimator, register_estimator
from cepo.commands.cli import main
from cepo.config import check_config, load_config
from cepo.errors import ConfigError, unusable_place
from cepo.files.own_cache import own_folder
from cepo.report.page import open_run
from cepo.rewards.contract import ContractError, load_reward
from cepo.run_folder.layout import run_folder_of
from cepo.run_folder.own_records import remember_own_record
from cepo.run_folder.sinks.base import RunDescription
from cepo.run_folder.sinks.tracker import build_tracker
from cepo.runtime.preflight import check_devices, require_one_process, require_writable
from cepo.types import TokenSignal

REPOSITORY = Path(__file__).resolve().parents[2]


def run_with_sinks(folder: Path, *sinks: str) -> None:
    tracker = build_tracker(sinks, RunDescription(folder=folder, config_text="a: 1\n", max_steps=1))
    tracker.log_metrics(1, {"reward/accuracy": 0.5})
    tracker.close()


def test_a_run_has_records_whatever_its_loggers_are(tmp_path: Path) -> None:
    run_with_sinks(tmp_path / "run", "console")
    assert open_run(tmp_path / "run").series("reward/accuracy") == ([1], [0.5])


def test_a_name_inside_a_run_folder_means_the_run(tmp_path: Path) -> None:
    run = tmp_path / "cepo" / "demo"
    run_with_sinks(run, "file")
    assert run_folder_of(run / "global_step_20") == run
    assert run_folder_of(run / "metrics.jsonl") == run
    assert run_folder_of(run) == run
    assert run_folder_of(tmp_path / "global_step_20") == tmp_path / "global_step_20"


def test_a_folder_of_runs_lists_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        run_with_sinks(tmp_path / "cepo" / name, "file")
    assert main(["report", str(tmp_path)]) == 2
    assert f"Runs in it: {tmp_path}/cepo/a, {tmp_path}/cepo/b" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "advice"),
    [
        ({"WORLD_SIZE": "16", "RANK": "9"}, "torchrun, accelerate or deepspeed has started this as process 9 of 16"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "trainer.n_gpus_per_node=N` without the launcher"),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"}, "srun has started this as process 3 of 8"),
    ],
)
def test_a_launcher_is_refused_with_the_right_command(environment: dict[str, str], advice: str) -> None:
    with pytest.raises(ConfigError) as raised:
        require_one_process(environment)
    assert advice in str(raised.value)


@pytest.mark.parametrize(
    "environment", [{}, {"WORLD_SIZE": "1", "RANK": "0"}, {"WORLD_SIZE": "8"}, {"SLURM_PROCID": "0"}]
)
def test_a_single_process_may_train(environment: dict[str, str]) -> None:
    require_one_process(environment)


def test_torchrun_starts_no_second_trainer(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with restored_process():
        assert main(["train", "config=microgeo/base"]) == 2
    assert "process 1 of 2" in caplog.text


def test_a_shipped_name_may_be_a_base(tmp_path: Path) -> None:
    config = load_config([write(tmp_path, "run.yaml", "base: microgeo/base\ntrainer: {max_steps: 7}\n")])
    assert config.trainer.max_steps == 7
    assert config.worker.actor.model.model_path == "microgeo:model"
    assert "Did you mean 'microgeo/base'?" in message_of([write(tmp_path, "bad.yaml", "base: microgeo/bse\n")])
    assert "Did you mean 'geo3k/cepo'?" in message_of(["config=geo3k/cpeo"])


def test_the_file_of_the_trainer_is_no_program() -> None:
    command = [sys.executable, str(REPOSITORY / "cepo" / "train.py"), "config=microgeo/base"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.strip() == "run the module, not its file: python3 -m cepo.train config=FILE a.b.c=value ..."


def test_train_wants_a_configuration_and_not_its_name() -> None:
    with pytest.raises(ConfigError, match=r"cepo\.train\(cepo\.load_config\('microgeo/quickstart'\)\)"):
        cepo.train("microgeo/quickstart")  # type: ignore[arg-type]


def test_a_method_needs_a_signal_of_the_right_form() -> None:
    class Lacking(Estimator): ...

    with pytest.raises(ConfigError, match=r"'lacking_one': the class .*Lacking must define signal"):
        register_estimator("lacking_one")(Lacking)  # type: ignore[type-abstract]

    class Faulty(Lacking):
        result: object

        def signal(self, batch, *, step):  # type: ignore[override]
            return self.result

    method = object.__new__(Faulty)
    batch = type("Batch", (), {"response_mask": torch.ones(2, 3, dtype=torch.bool)})()
    for result, advice in (
        (torch.zeros(2, 3), "returned a Tensor"),
        (TokenSignal(advantages=torch.zeros(3, 2)), r"shape \(3, 2\)"),
    ):
        method.result = result
        with pytest.raises(ConfigError, match=advice):
            method.checked_signal(batch, step=0)  # type: ignore[arg-type]


def test_a_cache_that_is_a_file_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What would be kept there is kept for this run alone, and the run goes on."""
    (tmp_path / "cache").write_text("")
    assert own_folder(tmp_path / "cache" / "cepo").is_dir()
    assert "XDG_CACHE_HOME names another folder for caches" in caplog.text
    assert unusable_place(OSError("a bug")) is None
    assert unusable_place(ValueError("a bug")) is None


def test_a_run_folder_below_a_file_is_refused_early(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written: .*/file is a file\. Choose another"):
        require_writable(tmp_path / "file" / "run")
    require_writable(tmp_path / "new" / "run")
    assert not (tmp_path / "new").exists()


def test_several_machines_without_a_cluster_are_refused_early() -> None:
    trainer = load("trainer.nnodes=2", "trainer.n_gpus_per_node=2", "worker.rollout.n=8").trainer
    with pytest.raises(ConfigError, match=r"needs a Ray cluster of 2 machines.*`ray start --head`"):
        check_devices(trainer)


@pytest.mark.parametrize(
    ("setting", "advice"),
    [
        ("worker.actor.model.model_path=https://huggingface.co/Qwen/Qwen3-VL-2B", "not a hub name (org/name)."),
        ("data.train_files=openai/gsm8k:train", "not a hub name (org/name@split)."),
        ("worker.reward.reward_function=DIR/my_rewrd.py:score", "there is no such file"),
        ("worker.reward.reward_function=my_reward.score", "must have the form path/file.py:function."),
        ("worker.reward.reward_function=my_reward.py::score", "must have the form path/file.py:function."),
        ("algorithm.adv_estimator=GRPO", "Did you mean 'grpo'?"),
        ("worker.actor.loss_type=GSPO", "Did you mean 'gspo'?"),
    ],
)
def test_a_wrong_value_is_told_its_form_or_a_near_name(tmp_path: Path, setting: str, advice: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_config(
            load_config(
                [
                    *REQUIRED,
                    "worker.rollout.n=4",
                    "trainer.val_before_train=false",
                    setting.replace("DIR", str(tmp_path)),
                ]
            )
        )
    assert advice in str(raised.value).replace(str(tmp_path), "DIR")


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        (
            "def score(sample): return {'overall': float(sample['response'] == sample['ground_truth'])}",
            "REWARD_TYPE = 'sequential'",
        ),
        ("def score(completions, **kwargs): return [0.0 for _ in completions]", "takes one"),
        ("def score(completions, answer, **kwargs): return [0.0]", "a reward of TRL"),
        ("def score(data_source, solution_str, ground_truth, extra_info=None): return 0.0", "a reward of verl"),
        ("def score(predicts, ground_truths): return [{'overall': 0.0}]", "EasyR1's earlier versions"),
    ],
)
def test_another_contract_of_rewards_is_recognised(tmp_path: Path, text: str, advice: str) -> None:
    (tmp_path / "reward.py").write_text(text + "\n")
    if advice == "takes one":  # a list of numbers is refused when it comes
        advice = "Return a dict such as"
    with pytest.raises(ValueError, match=advice):
        load_reward(f"{tmp_path / 'reward.py'}:score", {}).score([{"response": "4", "ground_truth": "4"}])


def test_a_reward_that_fails_by_itself_keeps_its_error(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def score(samples): return [{'overall': s['label']} for s in samples]\n")
    with pytest.raises(KeyError, match="label") as raised:
        load_reward(f"{tmp_path / 'reward.py'}:score", {}).score([{"response": "4", "ground_truth": "4"}])
    assert not isinstance(raised.value, ContractError)


def test_a_named_python_without_the_package_is_refused(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    command = f"source '{REPOSITORY}/scripts/common.sh'; ensure_environment cpu"
    environment = {**os.environ, "CEPO_PYTHON": str(bare)}
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 1
    assert "has no click omegaconf pydantic torch transformers. Install them:" in ended.stderr


def test_a_home_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A home below a file is one for every user; the run goes on, and is not noted as the user's own."""
    (tmp_path / "file").write_text("")
    home = tmp_path / "file" / "home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    remember_own_record("trainer:\n  seed: 1\n")
    assert f"nothing can be written in the home folder {home} (Not a directory). Set HOME to" in caplog.text
    elsewhere = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "run"))
    assert "trainer.save_checkpoint_path for the run" in (unusable_place(elsewhere) or "")
