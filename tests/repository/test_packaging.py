"""A wheel alone is enough: shipped files by name, no start-up hook, and a methods' core that needs torch and nothing heavier."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
SHIPPED = (
    "configs/geo3k/cepo.yaml", "configs/format_prompt/geo3k.jinja", "configs/teacher/user_suffix.jinja",
    "scripts/geo3k/cepo.sh", "scripts/common.sh",
)  # fmt: skip
pytestmark = pytest.mark.heavy
HEAVIER = ("accelerate", "datasets", "matplotlib", "omegaconf", "peft", "ray", "transformers", "vllm")


def ran(*command: str, folder: Path, **variables: str) -> str:
    """What a command prints in `folder`, with these environment variables beside the others."""
    done = subprocess.run(
        command, cwd=folder, env=os.environ | variables, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def python(code: str, *, packages: Path, folder: Path) -> str:
    """What a process prints that finds cepo in `packages` and works in `folder`."""
    return ran(sys.executable, "-P", "-c", code, folder=folder, PYTHONPATH=str(packages))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip install 'cepo[dev]'")
    folder = tmp_path_factory.mktemp("dist")
    ran(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), folder=REPOSITORY)
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as pip's site-packages with the wheel alone."""
    folder = tmp_path_factory.mktemp("site-packages")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def test_a_wheel_has_what_is_run_and_nothing_that_runs_by_itself(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {
        "cepo",
        next(name for name in names if ".dist-info" in name).split("/")[0],
    }
    assert [name for name in names if name.endswith(".pth") or "__pycache__" in name] == []
    assert {f"cepo/shipped/{needed}" for needed in SHIPPED} <= set(names)
    assert wheel.stat().st_size < 7_000_000


def test_metadata_are_complete_and_the_base_is_light(unpacked: Path) -> None:
    (file,) = unpacked.glob("cepo-*.dist-info/METADATA")
    fields: Message = Parser().parsestr(file.read_text(encoding="utf-8"))
    assert all(fields[name] for name in ("Author", "Summary", "License-Expression", "Requires-Python", "Project-URL"))
    assert len(fields.get_all("Classifier", [])) > 5
    always = [text for text in fields.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert sorted(text.split(">")[0] for text in always) == ["click", "jaxtyping", "pydantic"]


def test_shipped_configurations_are_found_by_name_in_a_wheel(unpacked: Path, tmp_path: Path) -> None:
    show = "from cepo.cli import main; import sys; sys.exit(main(['config', 'config=microgeo/cepo']))"
    settings = yaml.safe_load(python(show, packages=unpacked, folder=tmp_path))
    assert settings["algorithm"]["adv_estimator"] == "cepo"
    assert settings["data"]["format_prompt"] == str(unpacked / "cepo/shipped/configs/format_prompt/microgeo.jinja")
    (tmp_path / "microgeo").mkdir()
    (tmp_path / "microgeo" / "cepo").write_text("base: ../mine.yaml\nalgorithm: {adv_estimator: rloo}\n")
    (tmp_path / "mine.yaml").write_text((unpacked / "cepo/shipped/configs/microgeo/base.yaml").read_text())
    settings = yaml.safe_load(python(show, packages=unpacked, folder=tmp_path))
    assert settings["algorithm"]["adv_estimator"] == "rloo"


def test_init_copies_what_a_launcher_needs(unpacked: Path, tmp_path: Path) -> None:
    init = "from cepo.cli import main; import sys; sys.exit(main(['init', 'mine']))"
    assert "configs, examples" in python(init, packages=unpacked, folder=tmp_path)
    launcher = ("bash", "mine/scripts/geo3k/rlsd.sh", "4b", "trainer.seed=3")
    variables = {"CEPO_PYTHON": sys.executable, "DRY_RUN": "1", "PYTHONPATH": str(unpacked)}
    settings = yaml.safe_load(ran(*launcher, folder=tmp_path, **variables))
    assert (settings["algorithm"]["adv_estimator"], settings["trainer"]["seed"]) == ("rlsd", 3)
    twice = "from cepo.cli import main; print(main(['init', 'mine']))"
    assert python(twice, packages=unpacked, folder=tmp_path).strip() == "2"


def test_the_methods_core_needs_torch_and_nothing_heavier(unpacked: Path, tmp_path: Path) -> None:
    """Neither beside an older transformers, whose import would fail as here, nor without it."""
    for name in HEAVIER:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name}')\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import torch
import cepo.algorithms, cepo.losses
assert "cepo" in cepo.algorithms.available_estimators()
print([name for name in {HEAVIER} if name in sys.modules])
"""
    assert python(code, packages=unpacked, folder=tmp_path).strip() == "[]"
