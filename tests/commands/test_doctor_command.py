"""`cepo doctor` with whole configs on this machine."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest

from cepo.cli import main
from cepo.microgeo.world import build_world
from cepo.trainer.checkpoints import written_files


def examined(*arguments: str) -> tuple[int, str]:
    """The exit code and the report as one line."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setenv("COLUMNS", "400")
        code = main(["doctor", *arguments])
    return code, " ".join(printed.getvalue().split())


@pytest.mark.heavy
def test_the_embedded_worlds_config_could_start_here() -> None:
    """Its first 8 rows pass the processor."""
    code, report = examined("config=configs/microgeo/base.yaml")
    assert code == 0, report
    assert "1,315,392 parameters" in report
    assert "4096 rows; the first 8 have prompts of" in report
    assert "Training can start." in report


@pytest.mark.heavy
def test_a_model_of_9_trillion_parameters_exits_1_and_names_lora(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(build_world().model_path, model)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["text_config"] |= {"hidden_size": 65536, "intermediate_size": 2**18, "num_hidden_layers": 128}
    config["text_config"] |= {"num_attention_heads": 512, "num_key_value_heads": 512, "head_dim": 128}
    config["vision_config"]["out_hidden_size"] = 65536
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    code, report = examined("config=configs/microgeo/base.yaml", f"worker.actor.model.model_path={model}")
    assert code == 1
    assert "Training cannot start" in report
    assert "fits │ fail" in report
    assert "-> what helps: LoRA (worker.actor.model.lora.rank=16)" in report
    assert "checkpoints │ fail" in report
    assert report.count("│ fail │") == 2


@pytest.mark.heavy
def test_an_empty_answer_in_row_1_exits_1_and_names_the_row(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    rows = [{"problem": "1 + 1?", "answer": "2"}, {"problem": "1 + 2?", "answer": ""}]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    code, report = examined("config=configs/microgeo/base.yaml", f"data.train_files={file}")
    assert code == 1
    assert f"{file}, row 1: column 'answer' is empty" in report


def test_an_unknown_key_exits_2_without_looking_at_anything(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = examined("config=configs/microgeo/base.yaml", "trainer.max_step=3")
    assert (code, report) == (2, "")
    assert "Did you mean 'max_steps'?" in capsys.readouterr().err


@pytest.mark.heavy
def test_what_a_run_would_refuse_exits_1_with_a_remedy_for_each(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("import no_such_module_anywhere\n\ndef score(samples): ...\n", encoding="utf-8")
    train = tmp_path / "train.jsonl"
    train.write_text("\n".join(json.dumps({"problem": f"1 + {n}?", "answer": str(n + 1)}) for n in range(3)))
    run = tmp_path / "run" / "global_step_4"
    (run / "actor").mkdir(parents=True)
    written_by = {"adv_estimator": "rlsd", "model_path": "elsewhere", "lora_rank": 0, "state": {"step": 4}}
    (run / "trainer_state.json").write_text(json.dumps(written_by), encoding="utf-8")
    (run / "files.json").write_text(json.dumps(written_files(run)), encoding="utf-8")
    code, report = examined(
        "config=configs/microgeo/base.yaml",
        f"data.train_files={train}",
        f"worker.reward.reward_function={reward}:score",
        f"trainer.save_checkpoint_path={tmp_path / 'run'}",
    )
    assert code == 1
    assert "no_such_module_anywhere" in report
    assert "was written with adv_estimator=rlsd, but this run has grpo" in report
    assert "trainer.find_last_checkpoint=false" in report
    assert "3 rows, but data.rollout_batch_size is" in report
    assert report.count("│ fail │") == 3
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["global_step_4"], "nothing was written"


@pytest.mark.heavy
def test_the_doctor_checks_run_folder_and_checkpoint(
    tmp_path: Path,
) -> None:
    """A run folder below a file exits 1. A checkpoint that fits names the step from which the run would continue."""
    file = tmp_path / "notes.txt"
    file.touch()
    code, report = examined("config=configs/microgeo/base.yaml", f"trainer.save_checkpoint_path={file / 'run'}")
    assert code == 1
    assert f"{file} is a file" in report
    whole = tmp_path / "run" / "global_step_4"
    (whole / "actor").mkdir(parents=True)
    fits = {"adv_estimator": "grpo", "model_path": str(build_world().model_path), "lora_rank": 0, "state": {"step": 4}}
    (whole / "trainer_state.json").write_text(json.dumps(fits), encoding="utf-8")
    (whole / "files.json").write_text(json.dumps(written_files(whole)), encoding="utf-8")
    code, report = examined("config=configs/microgeo/base.yaml", f"trainer.save_checkpoint_path={tmp_path / 'run'}")
    assert code == 0, report
    assert "the run continues with step 5" in report
