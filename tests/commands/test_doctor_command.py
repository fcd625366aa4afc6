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


def examined(*arguments: str) -> tuple[int, str]:
    """The exit code and the report as one line."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setenv("COLUMNS", "400")
        code = main(["doctor", *arguments])
    return code, " ".join(printed.getvalue().split())


@pytest.mark.heavy
def test_the_embedded_worlds_config_could_start_here() -> None:
    """Nothing of its data is read."""
    code, report = examined("config=configs/microgeo/base.yaml")
    assert code == 0, report
    assert "1,315,392 parameters" in report
    assert "device │ ok │ CPU (" in report
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
    assert "fits each worker │ fail" in report
    assert "-> what helps: LoRA (worker.actor.model.lora.rank=16)" in report
    assert "checkpoints │ fail" in report
    assert report.count("│ fail │") == 2


def test_an_unknown_key_exits_2_without_looking_at_anything(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = examined("config=configs/microgeo/base.yaml", "trainer.max_step=3")
    assert (code, report) == (2, "")
    assert "Did you mean 'max_steps'?" in capsys.readouterr().err
