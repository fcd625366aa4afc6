"""The first command on a rented GPU, dry: what it would start on an H100, a B200 and an RTX PRO 6000 stands in golden files.

No such card is there. A stand-in (tests/fake_cuda) answers for `nvidia-smi` and for torch where it is asked about devices, and
the model is Qwen3-VL-2B's configuration alone. UPDATE_GOLDEN=1 writes the files anew.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fake_machine import REPOSITORY, card, fake_machine

from lab.support.published_models import published_config

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
SECTIONS = ("this config's devices", "this config's engine", "this config's memory")
H100 = card("NVIDIA H100 80GB HBM3", (9, 0), 80)
B200 = card("NVIDIA B200", (10, 0), 180)
RTX_PRO_6000 = card("NVIDIA RTX PRO 6000 Blackwell", (12, 0), 96)
MACHINES: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "h100": ([H100], []),
    "b200": ([B200], []),
    "rtx_pro_6000": ([RTX_PRO_6000], []),
    "two_h100_one_engine": ([H100, H100], ["worker.rollout.tensor_parallel_size=2"]),
}
MORE_CARDS = pytest.mark.nightly("each is a launcher of its own, which starts Python five times")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_vl_2b")
    published_config("2B").save_pretrained(folder)
    return folder


def dry_run(
    model: Path, devices: list[dict[str, Any]], *settings: str, driver: str = "580.65.06", **variables: str
) -> subprocess.CompletedProcess[str]:
    """The paper's command, which looks at the machine first and starts nothing."""
    environment = fake_machine(
        *devices,
        driver=driver,
        **{
            "DRY_RUN": "1", "SKIP_DOCTOR": "0", "NUM_GPUS": str(len(devices)), "MODEL_PATH": str(model), "COLUMNS": "3000",
            "CUDA_HOME": "/no/such/toolkit", "HF_HUB_OFFLINE": "1", **variables,
        },
    )  # fmt: skip
    command = ["bash", str(REPOSITORY / "scripts" / "geo3k" / "cepo.sh"), *settings]
    return subprocess.run(command, cwd=model, env=environment, capture_output=True, text=True, timeout=300, check=False)


def outcome(done: subprocess.CompletedProcess[str], model: Path) -> str:
    """The doctor's sections about this config and the plan, without this machine's paths."""
    lines: list[str] = []
    section = None
    for line in done.stderr.splitlines():
        cells = [" ".join(cell.split()) for cell in line.split("│")]
        if len(cells) == 3 and cells[0] and not cells[1]:
            section = cells[0]
        if section in SECTIONS and len(cells) == 3:
            lines.append(cells[0] if not cells[1] else f"  {cells[0]}: {cells[1]}: {cells[2]}")
    lines.append("plan")
    lines += [f"  {line.removeprefix('# ')}" for line in done.stdout.splitlines() if line.startswith("# ")]
    text = "\n".join(line for line in lines if line) + "\n"
    return text.replace(str(model), "MODEL").replace(str(REPOSITORY), "REPOSITORY")


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name", ["b200", *(pytest.param(name, marks=MORE_CARDS) for name in MACHINES if name != "b200")]
)
def test_the_papers_command_starts_as_its_golden_file_says(name: str, model_folder: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    devices, settings = MACHINES[name]
    done = dry_run(model_folder, devices, *settings)
    assert done.returncode == 0, done.stderr
    found, file = outcome(done, model_folder), GOLDEN / f"first_command_{name}.txt"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        file.parent.mkdir(exist_ok=True)
        file.write_text(found, encoding="utf-8")
    assert found == file.read_text(encoding="utf-8"), "if this is meant: UPDATE_GOLDEN=1 writes the file anew"


def golden(name: str) -> str:
    return (GOLDEN / f"first_command_{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "asked"), [("h100", False), ("b200", True), ("rtx_pro_6000", False)])
def test_the_golden_files_hold_what_the_audit_calls_right(name: str, asked: bool) -> None:
    """Only on a B200 FLASH_ATTN is asked for, where vLLM's own choice has no compiled kernels."""
    text = golden(name)
    assert ('"attention_config": {"backend": "FLASH_ATTN"}' in text) == asked
    assert "VLLM_USE_FLASHINFER_SAMPLER=0" in text
    assert '"enable_sleep_mode": true' in text
    assert '"max_lora_rank": 16' in text
    assert "fits GPU 0: ok" in text
    assert "samples per step: 32 prompts x 8 responses = 256" in text
    shared = golden("two_h100_one_engine")
    assert '"disable_custom_all_reduce": true' in shared
    assert "VLLM_ALLREDUCE_USE_SYMM_MEM=0" in shared
    assert "disable_custom_all_reduce" not in text


@pytest.mark.heavy
@MORE_CARDS
def test_a_b200_with_flashinfers_kernels_keeps_vllms_choice(model_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    (tmp_path / "flashinfer_jit_cache").mkdir()
    (tmp_path / "flashinfer_jit_cache" / "__init__.py").touch()
    paths = os.pathsep.join((str(REPOSITORY / "tests" / "fake_cuda"), str(REPOSITORY), str(tmp_path)))
    done = dry_run(model_folder, [B200], PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr
    text = outcome(done, model_folder)
    assert "options: info" in text
    assert "attention_config" not in text


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("driver", "settings", "named"),
    [
        pytest.param("570.86.10", [], "needed: 580 or later", marks=MORE_CARDS),
        (
            "580.65.06",
            ["worker.rollout.gpu_memory_utilization=0.97"],
            "another share for vLLM (worker.rollout.gpu_memory_utilization)",
        ),
    ],
)
def test_the_launcher_ends_where_the_doctor_says_no(
    driver: str, settings: list[str], named: str, model_folder: Path
) -> None:
    if settings:
        pytest.importorskip("vllm", reason="vLLM, whose share of the memory this is, is not installed")
    devices = [] if driver < "580" else [H100]
    done = dry_run(model_folder, devices, *settings, driver=driver, NUM_GPUS="1")
    assert done.returncode == 1
    assert named in " ".join(done.stderr.split())
    assert "SKIP_DOCTOR=1 tries it nevertheless" in done.stderr.splitlines()[-1]
    assert done.stdout == ""
